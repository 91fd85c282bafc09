"""Transient tensors: what weight gradients take beside the main ones, by how a stack makes them."""

import pytest

from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.buffers import Buffers, buffer_bytes
from moeplan.simulator.stack import load_stack

NATIVE = load_stack("native")
PLAN = Plan(
    model=load_model("h200-coarse"), hardware="h200", num_gpus=1, seq_len=4096, global_batch_size=32, mbs=4
)  # fmt: skip
LOGITS = 2 * 4 * 4096 * 32768
ROW_BYTES = 4 * 4096 * 2 * 2  # two copies of each token, BF16


def buffers(weight_gradients: str, loss_bytes: float = LOGITS) -> Buffers:
    stack = NATIVE.model_copy(update={"expert_weight_gradients": weight_gradients})
    return buffer_bytes(PLAN.model, PLAN.point, stack, ("moe",), loss_bytes)


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
