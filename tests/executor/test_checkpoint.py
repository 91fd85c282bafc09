"""Saving at one folding and going on at another, and what a damaged checkpoint says; in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moeplan.errors import InvalidInputError, RunFailedError
from moeplan.executor.checkpoint import Checkpointer
from moeplan.executor.checkpoint_files import LATEST, MANIFEST, latest_checkpoint, read_manifest
from moeplan.executor.data import open_tokens
from moeplan.executor.train import StepResult
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from tests.executor.cases import build_trainer, tiny_plan
from tests.executor.folding_cases import (
    GQA,
    MODELS,
    RUN,
    STEPS,
    TOLERANCE,
    Ran,
    alone,
    assert_same_run,
    assert_same_state,
    ran,
    ran_steps,
)
from tests.executor.pools import Pools

SAVED_AFTER = 3
Side = tuple[int, dict[str, Any]]
QUICK: dict[str, tuple[str, Side, Side]] = {
    "tp2 ep4 to pp2 cp2": ("gqa", (4, {"tp": 2, "ep": 4}), (4, {"pp": 2, "cp": 2, "etp": 2})),
    "pp2 vp2 etp2 to one process": ("mla", (4, {"pp": 2, "vp": 2, "etp": 2, "layout": "Et|tt|tm|mL"}), (1, {})),
}
REST: dict[str, tuple[str, Side, Side]] = {
    "full sharding of four to tp2 states on the host": (
        "gqa",
        (4, {"sharding": "full", "ep": 2}),
        (4, {"tp": 2, "offload_optimizer_states": True}),
    ),
    "one process to hybrid sharding of four": (
        "mla",
        (1, {}),
        (4, {"sharding": "full", "dp_replicate": 2, "ep": 2}),
    ),
    "hybrid sharding, part on the host, to full sharding over pp2": (
        "gqa",
        (4, {"sharding": "full", "dp_replicate": 2, "optimizer_cpu_frac": 0.3}),
        (4, {"sharding": "full", "pp": 2}),
    ),
    "a hybrid, tp2 to full sharding": ("delta-net", (2, {"tp": 2}), (2, {"sharding": "full", "cp": 2})),
    "one process to tp2 ep2": ("mla", (1, {}), (4, {"tp": 2, "ep": 2})),
    "tp4 ep8 of eight to etp4 of four": ("gqa", (8, {"tp": 4, "ep": 8}), (4, {"etp": 4})),
    "replicated states of two to pp4": ("mla", (2, {"sharding": "none"}), (4, {"pp": 4})),
    "sixteen to cp2 of two": ("gqa", (16, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}), (2, {"cp": 2})),
    "vp2 of four to tp2 cp2 pp2 of eight": (
        "gqa",
        (4, {"pp": 2, "vp": 2, "ep": 2}),
        (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    ),
    "Mamba over tp2 to cp2": ("nemotron", (2, {"tp": 2, "ep": 2}), (2, {"cp": 2, "sharding": "full"})),
    "ep2 of two to sixteen": ("windowed", (2, {"ep": 2}), (16, {"pp": 4, "cp": 2, "ep": 2, "sharding": "none"})),
}


def saving(folder: Path, **changes: Any) -> RunConfig:
    return RUN.model_copy(update={"save_folder": str(folder), **changes})


def save(rank: int, model: str, side: Side, run: RunConfig) -> None:
    """Some steps and a checkpoint; with ``save_async`` it is written while the next step runs."""
    trainer = build_trainer(rank, tiny_plan(MODELS[model], side[0], **side[1]), run)
    assert trainer.checkpoints is not None
    for number in range(SAVED_AFTER):
        trainer.step(number)
    trainer.checkpoints.save(SAVED_AFTER)
    trainer.step(SAVED_AFTER)
    trainer.checkpoints.wait()


def go_on(rank: int, model: str, side: Side, run: RunConfig) -> Ran:
    """The rest of the steps from the checkpoint."""
    # Of another seed, so that whatever is not loaded shows.
    trainer = build_trainer(rank, tiny_plan(MODELS[model], side[0], **side[1]), run.model_copy(update={"seed": 1}))
    trainer.tokens = open_tokens(trainer.plan, RUN)
    assert trainer.checkpoints is not None
    first = trainer.checkpoints.load()
    return ran_steps(trainer, range(first, STEPS))


def everywhere(pools: Pools, num_gpus: int, function: Any, *arguments: Any) -> list[Any]:
    return [function(0, *arguments)] if num_gpus == 1 else pools[num_gpus].run(function, *arguments)


def check(pools: Pools, case: tuple[str, Side, Side], run: RunConfig) -> None:
    model, before, after = case
    everywhere(pools, before[0], save, model, before, run)
    outcomes = everywhere(pools, after[0], go_on, model, after, run)
    whole = alone(model)
    rest = Ran(whole.losses[SAVED_AFTER:], whole.grad_norms[SAVED_AFTER:], whole.parts, whole.biases)
    assert_same_run(rest, outcomes)


@pytest.mark.parametrize("name", QUICK)
def test_a_run_goes_on_at_another_folding(pools: Pools, name: str, tmp_path: Path) -> None:
    check(pools, QUICK[name], saving(tmp_path, save_async=name.startswith("tp2")))


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_runs_go_on_at_other_foldings(pools: Pools, name: str, tmp_path: Path) -> None:
    check(pools, REST[name], saving(tmp_path, save_async="sixteen" in name))


def save_alone(folder: Path, **changes: Any) -> RunConfig:
    run = saving(folder, **changes)
    save(0, "gqa", (1, {}), run)
    return run


def saved_on_the_way(plan: Plan, run: RunConfig) -> list[StepResult]:
    """The steps after a save, in the run that saved."""
    trainer = build_trainer(0, plan, run)
    assert trainer.checkpoints is not None
    for number in range(SAVED_AFTER):
        trainer.step(number)
    trainer.checkpoints.save(SAVED_AFTER)
    return [trainer.step(number) for number in range(SAVED_AFTER, STEPS)]


def test_tokens_are_counted_over_batches_of_several_sizes(tmp_path: Path) -> None:
    run = save_alone(tmp_path)
    again = build_trainer(0, tiny_plan(GQA, 1, global_batch_size=16), run.model_copy(update={"steps": 20}))
    assert again.checkpoints is not None
    again.resume()
    assert again.tokens_at(SAVED_AFTER) == SAVED_AFTER * 8 * 16
    assert again.tokens_at(SAVED_AFTER + 2) == (SAVED_AFTER * 8 + 2 * 16) * 16
    again.step(SAVED_AFTER)
    again.checkpoints.save(SAVED_AFTER + 1)
    assert read_manifest(latest_checkpoint(tmp_path), GQA).tokens == (SAVED_AFTER * 8 + 16) * 16


def test_bf16_goes_on_bit_by_bit(tmp_path: Path) -> None:
    plan, run = tiny_plan(GQA, 1, precision="bf16"), saving(tmp_path)
    expected = saved_on_the_way(plan, run)
    again = build_trainer(0, plan, run)
    assert again.checkpoints is not None
    assert again.checkpoints.load() == SAVED_AFTER
    assert [again.step(number) for number in range(SAVED_AFTER, STEPS)] == expected


@pytest.mark.parametrize("changes", [{}, {"offload_optimizer_states": True}, {"optimizer_cpu_frac": 0.5}])
def test_bf16_moments_go_on_bit_by_bit_wherever_they_are(tmp_path: Path, changes: dict[str, Any]) -> None:
    plan, run = tiny_plan(GQA, 1, precision="bf16", moment_dtype="bf16"), saving(tmp_path)
    expected = saved_on_the_way(plan, run)
    again = build_trainer(0, plan.replace(**changes), run)
    assert again.checkpoints is not None
    assert again.checkpoints.load() == SAVED_AFTER
    assert [again.step(number) for number in range(SAVED_AFTER, STEPS)] == expected


def test_moments_of_another_type_go_on(tmp_path: Path) -> None:
    run = save_alone(tmp_path)
    for moment_dtype in ("fp32", "bf16"):
        trainer = build_trainer(0, tiny_plan(GQA, 1, precision="fp32", moment_dtype=moment_dtype), run)
        assert trainer.checkpoints is not None
        losses = [trainer.step(number).loss for number in range(trainer.checkpoints.load(), STEPS)]
        # 8 bits of the moments: 0.4 % of two updates.
        tolerance = 1e-4 if moment_dtype == "fp32" else 2e-3
        torch.testing.assert_close(losses, alone("gqa").losses[SAVED_AFTER:], rtol=0, atol=tolerance)


def test_another_precision_goes_on(tmp_path: Path) -> None:
    run = save_alone(tmp_path)
    for precision, tolerance in (("fp32", 1e-4), ("bf16", 0.03)):
        trainer = build_trainer(0, tiny_plan(GQA, 1, precision=precision), run)
        assert trainer.checkpoints is not None
        losses = [trainer.step(number).loss for number in range(trainer.checkpoints.load(), STEPS)]
        torch.testing.assert_close(losses, alone("gqa").losses[SAVED_AFTER:], rtol=0, atol=tolerance)


def test_a_new_save_leaves_the_one_before_it(tmp_path: Path) -> None:
    (tmp_path / ".saving-step-00000001").mkdir(parents=True)
    save_alone(tmp_path)
    save_alone(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [LATEST, "step-00000003", "step-00000003-2"]
    assert latest_checkpoint(tmp_path).name == "step-00000003-2"


def load_alone(run: RunConfig, model: str = "gqa") -> str:
    trainer = build_trainer(0, tiny_plan(MODELS[model], 1), run)
    assert trainer.checkpoints is not None
    with pytest.raises(InvalidInputError) as caught:
        trainer.checkpoints.load()
    assert caught.value.hint
    return caught.value.message


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = save_alone(tmp_path)
    assert "holds another model: attention of folded-gqa is" in load_alone(run, "mla")


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    run = save_alone(tmp_path)
    shard = next(latest_checkpoint(tmp_path).glob("__0_*"))
    content = bytearray(shard.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif damage == "cut":
        shard.write_bytes(content[:-100])
    else:
        shard.unlink()
    words = {"flip": "its checksum differs", "cut": "not the", "lose": "cannot be read: No such file"}
    message = load_alone(run)
    assert shard.name in message
    assert words[damage] in message


def save_twice(rank: int, run: RunConfig) -> None:
    trainer = build_trainer(rank, tiny_plan(GQA, 2, ep=2), run)
    assert trainer.checkpoints is not None
    for number in range(2):
        trainer.step(number)
        trainer.checkpoints.save(number + 1)
    trainer.checkpoints.wait()


def resumed(rank: int, side: Side, run: RunConfig) -> tuple[int, list[str]]:
    """Steps done, and what was left out."""
    trainer = build_trainer(rank, tiny_plan(GQA, side[0], **side[1]), run)
    assert trainer.checkpoints is not None
    trainer.resume()
    return trainer.first_step, trainer.checkpoints.skipped


def test_auto_resume_goes_on_from_the_newest_whole_checkpoint_and_says_what_it_left_out(
    pools: Pools, tmp_path: Path
) -> None:
    run = saving(tmp_path, steps=20)
    pools[2].run(save_twice, run)
    newest = tmp_path / "step-00000002"
    shard = next(newest.glob("__1_*"))  # which one rank of two looks at
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    message = f"{shard} is not what was written: its checksum differs"
    auto = run.model_copy(update={"auto_resume": True})
    assert pools[2].run(resumed, (2, {"pp": 2}), auto) == [(1, [message])] * 2
    assert resumed(0, (1, {}), auto) == (1, [message])
    assert message in load_alone(run)  # who asks for the latest gets no other
    assert shard.exists()
    (tmp_path / "step-00000001" / MANIFEST).unlink()
    assert load_alone(auto) == f"{message}; nor is any of the 1 before it whole"
    shard.write_bytes(content)
    assert resumed(0, (1, {}), auto) == (2, [])


def test_a_folder_without_a_whole_checkpoint_says_so(tmp_path: Path) -> None:
    run = saving(tmp_path / "none")
    assert "no checkpoint to resume from" in load_alone(run)
    run = save_alone(tmp_path)
    (latest_checkpoint(tmp_path) / MANIFEST).unlink()
    assert "names step-00000003, which is not there or not whole" in load_alone(run)


def test_the_manifest_says_what_the_checkpoint_is(tmp_path: Path) -> None:
    save_alone(tmp_path, seed=7)
    manifest = json.loads((latest_checkpoint(tmp_path) / MANIFEST).read_text(encoding="utf-8"))
    assert (manifest["step"], manifest["seed"], manifest["num_gpus"]) == (SAVED_AFTER, 7, 1)
    assert set(manifest["files"]) == {".metadata", "__0_0.distcp"}


def save_and_wait(checkpoints: Checkpointer) -> None:
    checkpoints.save(4)
    checkpoints.wait()


@pytest.mark.parametrize("save_async", [False, True])
def test_a_disk_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_async: bool) -> None:
    from torch.distributed.checkpoint import filesystem

    run = save_alone(tmp_path, save_async=save_async)
    trainer = build_trainer(0, tiny_plan(GQA, 1), run)
    assert trainer.checkpoints is not None

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(filesystem, "_write_item", fail)
    with pytest.raises(RunFailedError, match=r"cannot be written: .*No space left on device"):
        save_and_wait(trainer.checkpoints)
    assert latest_checkpoint(tmp_path).name == "step-00000003"


def test_a_save_that_fails_says_why_and_spares_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = save_alone(tmp_path, save_async=True)
    trainer = build_trainer(0, tiny_plan(GQA, 1), run)
    assert trainer.checkpoints is not None

    def fail(*_arguments: object) -> None:
        raise OSError("full")

    monkeypatch.setattr("moeplan.executor.checkpoint.finish_saving", fail)
    trainer.checkpoints.save(4)
    with pytest.raises(RunFailedError, match="cannot be written: full"):
        trainer.checkpoints.wait()
    assert latest_checkpoint(tmp_path).name == "step-00000003"
    trainer.checkpoints.load()
    expected = alone("gqa")
    losses = [trainer.step(number).loss for number in range(SAVED_AFTER, STEPS)]
    torch.testing.assert_close(losses, expected.losses[SAVED_AFTER:], rtol=0, atol=TOLERANCE)
    assert_same_state(expected, [ran(trainer, [], [])])
