"""Transient tensors: what weight gradients take beside the main ones, by how a stack makes them."""

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.model_spec import MOE_LAYER
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.buffers import Buffers, buffer_bytes
from moeplan.simulator.memory import peak_of_reading
from moeplan.simulator.stack import load_stack

NATIVE = load_stack("native")
PLAN = Plan(
    model=load_model("h200-coarse"), hardware="h200", num_gpus=1, seq_len=4096, global_batch_size=32, mbs=4
)  # fmt: skip
LOGITS = 2 * 4 * 4096 * 32768
ROW_BYTES = 4 * 4096 * 2 * 2  # two copies of each token, BF16


def buffers(weight_gradients: str, loss_bytes: float = LOGITS) -> Buffers:
    stack = NATIVE.model_copy(update={"expert_weight_gradients": weight_gradients})
    return buffer_bytes(PLAN.model, PLAN.point, stack, (MOE_LAYER,), loss_bytes)


def test_gradients_that_gemms_add_leave_the_working_set_alone() -> None:
    largest = ROW_BYTES * (2 * 14336 + 14336)
    assert buffers("none") == Buffers(0, 0, 0, largest - LOGITS, 0)
    assert buffers("none", 0) == Buffers(0, 0, 0, largest, 0)


def test_gradients_made_one_matrix_at_a_time() -> None:
    head, experts = 2 * 32768 * 4096, 2 * 8 * 4096 * 2 * 14336
    found = buffers("local")
    assert found.weight_gradients == head
    assert found.working_set == buffers("none").working_set + experts - head


@pytest.mark.parametrize("kind", ["none", "one", "local"])
def test_more_logits_never_need_more_beside_them(kind: str) -> None:
    assert sum(buffers(kind, 2 * LOGITS)) <= sum(buffers(kind))


@pytest.mark.parametrize(
    "shared_ffn, changes, measured_gib",
    [(0, {"ep_overlap": True}, 4.1), (1536, {"shared_expert_overlap": True}, 1.1)],
)
def test_exchanges_beside_compute_hold_their_rows(
    shared_ffn: int, changes: dict[str, bool], measured_gib: float
) -> None:
    """Peak allocated with overlap less without, h200-fine on two H200 (results/2026-11-29-h200x2-overlap.md)."""
    model, native, h200 = load_model("h200-fine"), load_stack("native"), load_profile("h200")
    assert model.moe is not None
    model = model.model_copy(update={"moe": model.moe.model_copy(update={"shared_ffn_size": shared_ffn})})
    fields: dict[str, object] = {"model": model, "hardware": "h200", "stack": "native", "num_gpus": 2, "ep": 2}
    fields |= {"seq_len": 4096, "global_batch_size": 64, "mbs": 4, "precision": "bf16", "routing": "natural"}
    apart, beside = (
        peak_of_reading(model, Plan.model_validate(fields | overlap).point, native, h200, "allocated")
        for overlap in ({}, changes)
    )
    assert (beside - apart) / 2**30 == pytest.approx(measured_gib, rel=0.1)
