"""Weight gradients of experts that two micro-batches add at once: the same training, and the memory predicted."""

from typing import Any

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from moeplan.executor.moe import Experts
from moeplan.executor.paired_weight_grad import waiting_bytes
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from moeplan.simulator.layer_state import waiting_bytes as predicted_bytes
from moeplan.simulator.placement import rank_chunks
from moeplan.simulator.stack import load_stack
from tests.executor.cases import GQA_MODEL, MLA_MODEL, build_trainer, run_steps, tiny_plan
from tests.executor.test_folding_equality import RUN

BOTH = {"paired_wgrad": ("expert_fc1", "expert_fc2")}


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": ("full",)},
        {"recompute": ("moe_act", "layernorm"), "paired_wgrad": ("expert_fc1",)},
        {"paged_stash_factor": 1.5},
        {"memory_efficient_permutation": False},
        {"routing": "drop"},
        {"offload_modules": ("expert_fc1",)},
        {"global_batch_size": 6, "mbs": 2},  # three micro-batches: the first goes alone
    ],
)
def test_training_is_that_without_pairs(changes: dict[str, Any]) -> None:
    plan = tiny_plan(GQA_MODEL, 1, **(BOTH | changes))
    paired, plain = (run_steps(0, one, RUN, 3) for one in (plan, plan.replace(paired_wgrad=())))
    assert paired.losses == pytest.approx(plain.losses, abs=1e-12)
    assert paired.grad_norms == pytest.approx(plain.grad_norms, rel=1e-12)


@pytest.mark.parametrize("matrices", [("expert_fc1",), ("expert_fc2",), ("expert_fc1", "expert_fc2")])
def test_what_waits_is_what_is_predicted(matrices: tuple[str, ...]) -> None:
    plan = tiny_plan(MLA_MODEL, 1, paired_wgrad=matrices)
    trainer = build_trainer(0, plan, RunConfig())
    seen = []

    def micro_batch(index: int) -> Any:
        seen.append(waiting_bytes(trainer.model))
        return trainer._micro_batch(0, index)

    trainer.pipeline.run(micro_batch)
    chunks = rank_chunks(plan.model, plan.layout, 1)[0]
    expected = predicted_bytes(plan.model, plan.point, load_stack("native"), chunks)
    assert seen == [0, expected] * 4
    assert waiting_bytes(trainer.model) == 0


def test_rows_go_while_their_tokens_wait() -> None:
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1, **BOTH), RunConfig())
    rows: list[StorageWeakRef] = []
    for experts in (one for one in trainer.model.modules() if isinstance(one, Experts)):
        experts.register_forward_pre_hook(lambda _, args: rows.append(StorageWeakRef(args[0].untyped_storage())))

    def micro_batch(index: int) -> Any:
        assert len(rows) == index
        assert all(one.expired() for one in rows)
        return trainer._micro_batch(0, index)

    trainer.pipeline.run(micro_batch)
    assert len(rows) == 8


def test_what_it_does_not_go_with() -> None:
    for changes, match in (
        ({"sharding": "full"}, "excludes sharding full"),
        ({"global_batch_size": 1}, "two micro-batches"),
    ):
        with pytest.raises(ValueError, match=match):
            Plan.model_validate(tiny_plan(GQA_MODEL, 1).model_dump() | BOTH | changes)
