"""Dynamic context parallelism on 2 to 4 processes against one process, in float64: whatever the mix of lengths."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moeplan.cp_schedule import PlacedPack
from moeplan.executor import pack_batches
from moeplan.executor.data import open_tokens
from moeplan.executor.step_log import StepLog
from moeplan.executor.train import train
from moeplan.flops import training_flops_per_token
from moeplan.hwprofiles.load import load_profile
from moeplan.plan import Plan
from moeplan.simulator.pack_costs import PackCosts
from moeplan.simulator.stack import load_stack
from moeplan.step_packs import step_packs
from tests.executor.cases import build_trainer, tiny_plan
from tests.executor.folding_cases import MODELS, RUN, TOLERANCE, Ran, assert_same_run, quick_and_slow, ran_steps
from tests.executor.pools import Pools
from tests.executor.traffic import counting_traffic

# 128 tokens a step: long documents among short ones, many short ones, odd lengths, and one token left over at the end.
MIXES = {
    "long and short": (16, *(4,) * 8, 8, 8, 16, 2, 2, 2, 2, 8, 8, 8, 8, 4, 4),
    "short": (2, 6, 4, 4) * 8,
    "odd": (15, 1, 3, 13, 5, 11, 7, 9, 16, 1, 1, 14, 2, 10, 6, 4, 7, 3),
    "left over": (*(16,) * 7, 11, 4, 1),
    "whole sequences": (16,) * 8,
}

STEPS = 2


def dynamic_plan(model: str, num_gpus: int, mix: str, **changes: Any) -> Plan:
    """A rank holds eight tokens a micro-batch unless told otherwise; one rank alone has to hold every document."""
    fields = {"dynamic_cp": True, "document_lengths": MIXES[mix], "max_tokens_per_rank": 8 if num_gpus > 1 else 16}
    return tiny_plan(MODELS[model], num_gpus, **(fields | changes))


def train_dynamic(rank: int, model: str, num_gpus: int, mix: str, changes: dict[str, Any]) -> Ran:
    """All steps of one plan; every rank of it calls this together."""
    return ran_steps(build_trainer(rank, dynamic_plan(model, num_gpus, mix, **changes), RUN), range(STEPS))


@lru_cache
def alone_dynamic(model: str, mix: str) -> Ran:
    return train_dynamic(0, model, 1, mix, {})


QUICK: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "groups of 1, 2 and 4": (4, "gqa", "long and short", {"max_tokens_per_rank": 4, "ep": 4}),
    "odd lengths, ranks without tokens": (4, "gqa", "left over", {"ep": 2}),
    "padding cut by tp2": (4, "gqa", "odd", {"tp": 2, "ep": 4}),
}
REST: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "groups of 1 and 2": (2, "gqa", "long and short", {}),
    "nothing long, a static cp of 2 not used": (4, "gqa", "short", {"cp": 2}),
    "pp2": (4, "gqa", "odd", {"pp": 2, "ep": 2}),
    "windows": (4, "windowed", "odd", {}),
    "states through documents": (2, "delta-net", "odd", {"ep": 2}),
    "Mamba's states, ranks that share a group": (4, "nemotron", "odd", {"ep": 2}),
    "full sharding, full recompute": (4, "gqa", "odd", {"sharding": "full", "recompute": ("full",), "pp": 2}),
    "some recompute": (2, "gqa", "odd", {"recompute": ("core_attn", "layernorm", "moe_act"), "etp": 2}),
    "every token to every rank": (4, "gqa", "left over", {"ep": 2, "etp": 2, "dispatcher": "allgather"}),
    "a copy for each rank, clones of hot experts": (
        4,
        "gqa",
        "odd",
        {"ep": 4, "dispatcher": "flex", "flex_backend": "torch", "echo_slots": 1},
    ),
    "exchanges beside compute": (4, "gqa", "odd", {"ep": 2, "ep_overlap": True, "delay_wgrad": True}),
}


def test_the_log_counts_flops_of_documents_not_of_whole_sequences(tmp_path: Path) -> None:
    trainer = build_trainer(0, dynamic_plan("gqa", 1, "short"), RUN.model_copy(update={"steps": 4}))
    record = train(trainer, lambda _line: None, StepLog(tmp_path, 0))
    line = json.loads((tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()[0])
    flops = 128 * training_flops_per_token(trainer.plan.model, 16, MIXES["short"])
    assert line["model_tflops_per_gpu"] == pytest.approx(flops / record.step_times_s[0] / 1e12)


def test_one_process_packs_whole_sequences_as_a_static_plan_does() -> None:
    static = ran_steps(build_trainer(0, tiny_plan(MODELS["gqa"], 1), RUN), range(STEPS))
    assert_same_run(static, [alone_dynamic("gqa", "whole sequences")])


@pytest.mark.parametrize("case", quick_and_slow(QUICK, REST))
def test_any_mix_of_lengths_equals_one_process(pools: Pools, case: tuple[int, str, str, dict[str, Any]]) -> None:
    num_gpus, model, mix, changes = case
    ranks = pools[num_gpus].run(train_dynamic, model, num_gpus, mix, changes)
    assert_same_run(alone_dynamic(model, mix), ranks)


def test_the_quick_cases_have_groups_of_every_size_and_idle_ranks() -> None:
    sizes, num_idle = set(), 0
    for num_gpus, model, mix, changes in QUICK.values():
        plan = dynamic_plan(model, num_gpus, mix, **changes)
        packs = step_packs(plan, plan.document_lengths)
        sizes |= {pack.num_ranks for batch in packs for pack in batch}
        num_idle += sum(plan.dp * plan.cp - sum(pack.num_ranks for pack in batch) for batch in packs)
    assert sizes == {1, 2, 4}
    assert num_idle


@pytest.mark.slow
def test_a_loss_over_packs_and_latent_attention_equal_one_process(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The balancing loss of a whole pack depends on how documents are packed: here one process runs the same packs."""
    folded = dynamic_plan("mla", 4, "odd", ep=4, max_tokens_per_rank=4, recompute=("mla_up_proj",))
    packs = step_packs(folded, folded.document_lengths)

    def one_by_one(_plan: Plan, _lengths: Sequence[int]) -> tuple[tuple[PlacedPack, ...], ...]:
        return tuple((PlacedPack(0, 1, pack.documents),) for batch in packs for pack in batch)

    monkeypatch.setattr(pack_batches, "step_packs", one_by_one)
    expected = train_dynamic(0, "mla", 1, "odd", {})
    changes = {"ep": 4, "max_tokens_per_rank": 4, "recompute": ("mla_up_proj",)}
    assert_same_run(expected, pools[4].run(train_dynamic, "mla", 4, "odd", changes))


def validation_loss(rank: int, num_gpus: int, mix: str) -> float:
    run = RUN.model_copy(update={"eval_every": 1})
    return build_trainer(rank, dynamic_plan("gqa", num_gpus, mix), run).evaluate()


@pytest.mark.slow
def test_validation_loss_equals_one_process(pools: Pools) -> None:
    expected = validation_loss(0, 1, "odd")
    for loss in pools[4].run(validation_loss, 4, "odd"):
        assert loss == pytest.approx(expected, abs=TOLERANCE)


def test_packs_read_the_data_that_a_resumed_run_goes_on_with(tmp_path: Path) -> None:
    run = RUN.model_copy(update={"save_folder": str(tmp_path), "data_order": "shuffled", "steps": 20})
    trainer = build_trainer(0, dynamic_plan("gqa", 1, "whole sequences"), run)
    assert trainer.checkpoints is not None
    trainer.checkpoints.save(1)
    more = {"global_batch_size": 9, "document_lengths": (16,) * 9}
    again = build_trainer(0, dynamic_plan("gqa", 1, "whole sequences", **more), run)
    again.resume()
    found = again._micro_batch(1, 0).tokens[0]
    assert torch.equal(found, trainer.tokens.document(1, 0, 16)[:-1])  # the ninth sequence, which comes next
    assert not torch.equal(found, open_tokens(again.plan, run).document(1, 0, 16)[:-1])


def forward_ring_bytes(rank: int, plan: Plan) -> list[int]:
    """Sent in rings by this rank in the forward of each micro-batch."""
    trainer, found = build_trainer(rank, plan, RUN), []
    assert trainer.packs is not None
    for index in range(trainer.pipeline.shape.num_micro_batches):
        with counting_traffic() as calls, torch.no_grad():
            trainer.pipeline._module(0)(trainer.packs.micro_batch(trainer.tokens, 0, index), None)
        found.append(sum(call.message_bytes for call in calls if call.kind == "send"))
    return found


def test_bytes_of_rings_are_those_that_are_predicted(pools: Pools) -> None:
    plan = dynamic_plan("gqa", 4, "long and short", max_tokens_per_rank=4, ep=4)
    num_layers = plan.model.num_layers + plan.model.num_mtp_layers
    costs = PackCosts(plan, load_profile("h100"), load_stack("native"))
    ranks = pools[4].run(forward_ring_bytes, plan)
    for index, batch in enumerate(step_packs(plan, plan.document_lengths)):
        for pack in batch:
            tokens = sum(plan.document_lengths[document] for document in pack.documents)
            expected = num_layers * costs.ring_bytes(tokens, pack.num_ranks)
            for rank in range(pack.first_rank, pack.first_rank + pack.num_ranks):
                assert ranks[rank][index] == expected
    assert sum(map(sum, ranks))
