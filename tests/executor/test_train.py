"""The loop itself: progress, the record it leaves, and what is not finite."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moeplan.errors import RunFailedError
from moeplan.executor.guard import SPIKE_MIN_STEPS
from moeplan.executor.step_log import StepLog
from moeplan.executor.train import train
from moeplan.flops import training_flops_per_token
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, MLA_MODEL, build_trainer, tiny_plan, weights_of, whole_weights
from tests.executor.gloo_pool import GlooPool, gloo_pool


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(2, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


def poisoned_step(rank: int, plan: Plan, run: RunConfig, poisoned_rank: int, what: str) -> str:
    """What the second step says when a weight (before) or a gradient (after backward) of one rank is not a number."""
    trainer = build_trainer(rank, plan, run)
    trainer.step(0)
    if rank == poisoned_rank:
        buffer = trainer.optimizer.classes[0].buffer
        if what == "loss":  # all weights, because the first are those of a token that does not occur
            with whole_weights(trainer.optimizer):
                buffer.weights.fill_(math.nan)
        else:
            buffer.main_grads[0].add_(torch.full_like(buffer.main_grads[0].total, math.nan))
    try:
        trainer.step(1)
    except RunFailedError as error:
        return error.message
    return "finished"


def test_a_loss_that_is_not_finite_names_step_and_rank(pool: GlooPool) -> None:
    messages = pool.run(poisoned_step, tiny_plan(GQA_MODEL, 2), RunConfig(), 1, "loss")
    assert messages == ["loss is nan at step 2 on rank 1, first in embedding.weight"] * 2


def test_a_gradient_that_is_not_finite_stops_every_rank(pool: GlooPool) -> None:
    messages = pool.run(poisoned_step, tiny_plan(GQA_MODEL, 2), RunConfig(), 1, "gradient")
    # The sum has it in the shard of rank 0; the rank that brought it is named.
    assert messages == ["gradient norm is nan at step 2 on rank 1, first in embedding.weight"] * 2


def test_a_spike_ends_the_run_and_names_a_tensor() -> None:
    # Whatever the norms are, each is a spike by this factor once there are enough of them to judge by.
    run = RunConfig(spike_factor=1e-3)
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1), run)
    for number in range(SPIKE_MIN_STEPS):
        assert trainer.step(number).spike == 0
    names = {piece.name for entry in trainer.model.table.entries for piece in entry.pieces}
    with pytest.raises(RunFailedError, match=r"at step 9 is .* times its recent median") as caught:
        trainer.step(SPIKE_MIN_STEPS)
    assert caught.value.message.split("most of it in ")[1].removesuffix(" on rank 0") in names


def test_the_update_of_a_spike_can_be_left_out() -> None:
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1), RunConfig(spike_factor=1e-3, skip_spikes=True))
    for number in range(SPIKE_MIN_STEPS):
        trainer.step(number)
    before = [part.values for part in weights_of(trainer)]
    assert trainer.step(SPIKE_MIN_STEPS).spike > 0
    for part, values in zip(weights_of(trainer), before, strict=True):
        torch.testing.assert_close(part.values, values, rtol=0, atol=0)
    trainer.spikes.factor = 0.0
    trainer.step(SPIKE_MIN_STEPS + 1)
    assert any(not torch.equal(part.values, old) for part, old in zip(weights_of(trainer), before, strict=True))


def test_the_log_has_every_step_and_validation(tmp_path: Path) -> None:
    plan = tiny_plan(GQA_MODEL, 1, precision="fp32")
    trainer = build_trainer(0, plan, RunConfig(steps=6, eval_every=4, profile_steps=1))
    record = train(trainer, lambda _line: None, StepLog(tmp_path, 0))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5, 6, 6]
    assert [line["loss"] for line in steps] == record.losses
    assert [line["step_s"] for line in steps] == record.step_times_s
    assert [line["tokens"] for line in steps] == [128 * step for step in range(1, 7)]
    rate = 128 / record.step_times_s[0] * training_flops_per_token(plan.model, 16) / 1e12
    assert steps[0]["model_tflops_per_gpu"] == pytest.approx(rate)


def test_the_record_has_every_step_and_the_time_of_the_traced_ones() -> None:
    run = RunConfig(steps=6, profile_steps=2, log_every=4)
    lines: list[str] = []
    record = train(build_trainer(0, tiny_plan(GQA_MODEL, 1, precision="fp32"), run), lines.append)
    assert len(record.losses) == len(record.step_times_s) == 6
    assert [line.split("  ")[0] for line in lines] == ["step 4/6", "step 6/6"]
    assert f"loss {record.losses[3]:.4f}" in lines[0]
    traced_s = sum(record.step_times_s[4:]) / 2
    assert sum(time.exposed_s for time in record.family_times.values()) == pytest.approx(traced_s, rel=0.3)
    assert record.peak_bytes.allocated > 0


def test_training_learns_real_text() -> None:
    run = RunConfig(steps=30, lr=1e-2, lr_warmup_steps=3)
    plan = tiny_plan(GQA_MODEL, 1, precision="fp32", seq_len=32)
    trainer = build_trainer(0, plan, run)
    losses = [trainer.step(number).loss for number in range(30)]
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert sum(losses[-5:]) / 5 < 4.0
    assert torch.isfinite(torch.tensor(losses)).all()


def test_validation_changes_nothing_and_falls_with_training() -> None:
    plan = tiny_plan(GQA_MODEL, 1, precision="fp32", seq_len=32)
    settings = {"steps": 24, "lr": 1e-2, "lr_warmup_steps": 3, "profile_steps": 1}
    lines: list[str] = []
    plain = train(build_trainer(0, plan, RunConfig(**settings)), lines.append)
    validated = train(build_trainer(0, plan, RunConfig(**settings, eval_every=10)), lines.append)
    assert plain.validation_losses == []
    assert [steps for steps, _ in validated.validation_losses] == [10, 20, 24]
    losses = [loss for _, loss in validated.validation_losses]
    assert losses[-1] < losses[0] < math.log(256) + 0.2
    assert f"step 10/24  validation loss {losses[0]:.4f}" in lines


def busiest_load(rank: int, plan: Plan, run: RunConfig) -> float:
    return build_trainer(rank, plan, run).step(0).busiest_load


@pytest.mark.parametrize("model", [GQA_MODEL, MLA_MODEL])
def test_the_load_of_the_busiest_expert_is_that_of_the_record(model: ModelSpec, tmp_path: Path) -> None:
    found = busiest_load(0, tiny_plan(model, 1), RunConfig(log_balance=True, record_routing=str(tmp_path)))
    record = torch.load(tmp_path / "step-00000001" / "rank-00000.pt")
    del record["places"]
    counts = [torch.bincount(index.flatten().long(), minlength=8).double() for index in record.values()]
    assert found == pytest.approx(max(float(one.max() / one.mean()) for one in counts))
    assert busiest_load(0, tiny_plan(model, 1), RunConfig()) == 0


@pytest.mark.parametrize("folding", [{"ep": 2}, {"pp": 2}])
def test_the_busiest_load_is_that_of_all_ranks(pool: GlooPool, folding: dict[str, Any]) -> None:
    run = RunConfig(log_balance=True)
    expected = busiest_load(0, tiny_plan(GQA_MODEL, 1), run)
    assert pool.run(busiest_load, tiny_plan(GQA_MODEL, 2, **folding), run) == pytest.approx([expected] * 2)


def test_several_batches_of_validation_are_one_large_one() -> None:
    twice = build_trainer(0, tiny_plan(GQA_MODEL, 1), RunConfig(eval_every=1, eval_batches=2))
    large = build_trainer(0, tiny_plan(GQA_MODEL, 1, global_batch_size=16), RunConfig(eval_every=1))
    assert twice.evaluate() == pytest.approx(large.evaluate(), rel=1e-12)


def test_validation_leaves_the_expert_bias_and_its_counts_alone() -> None:
    trainer = build_trainer(0, tiny_plan(MLA_MODEL, 1), RunConfig(eval_every=1))
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first == again
    assert all(not router.num_copies_E.any() for router in trainer.model.routers())


def evaluated(rank: int, plan: Plan, run: RunConfig) -> float:
    return build_trainer(rank, plan, run).evaluate()


@pytest.mark.parametrize("folding", [{"tp": 2}, {"ep": 2}, {"pp": 2}, {"sharding": "full"}])
def test_validation_does_not_depend_on_the_folding(pool: GlooPool, folding: dict[str, Any]) -> None:
    run = RunConfig(eval_every=1)
    expected = build_trainer(0, tiny_plan(GQA_MODEL, 1), run).evaluate()
    assert pool.run(evaluated, tiny_plan(GQA_MODEL, 2, **folding), run) == pytest.approx([expected] * 2, rel=1e-12)
