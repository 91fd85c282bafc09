"""Judging gradient norms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import RunFailedError
from moeplan.executor.guard import SPIKE_MIN_STEPS, SPIKE_WINDOW, SpikeGuard, check_finite, largest_tensor
from moeplan.executor.mesh import Group

ALONE = Group((0,), 0, None)


def test_what_is_finite_passes_without_a_look_at_the_tensors() -> None:
    check_finite("loss", [1.0, -2.0], 3, (pytest.fail("looked at") for _ in range(1)), ALONE)


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    tensors = [("whole", torch.ones(2)), ("broken", torch.tensor([1.0, math.inf])), ("later", torch.tensor([math.nan]))]
    with pytest.raises(RunFailedError, match=r"^loss is inf at step 3 on rank 0, first in broken$"):
        check_finite("loss", [math.inf], 3, tensors, ALONE)
    with pytest.raises(RunFailedError, match=r"^loss is nan at step 3 on rank 1$"):
        check_finite("loss", [0.0, math.nan], 3, tensors[:1], ALONE)


def test_the_largest_tensor_is_named() -> None:
    assert largest_tensor([("small", torch.ones(4)), ("large", torch.ones(9))], ALONE) == ("large", 0)


def test_a_spike_does_not_raise_the_median_it_is_judged_by() -> None:
    guard = SpikeGuard(10.0)
    assert [guard.excess(1.0) for _ in range(SPIKE_MIN_STEPS)] == [0.0] * SPIKE_MIN_STEPS
    assert [guard.excess(50.0) for _ in range(2 * SPIKE_WINDOW)] == [50.0] * 2 * SPIKE_WINDOW
    assert guard.excess(10.0) == 0.0


def test_early_norms_and_a_factor_of_zero_are_never_spikes() -> None:
    early = SpikeGuard(2.0)
    assert all(early.excess(10.0**step) == 0 for step in range(SPIKE_MIN_STEPS))
    off = SpikeGuard(0.0)
    assert all(off.excess(10.0**step) == 0 for step in range(50))


@given(st.lists(st.floats(1.0, 1.9), min_size=1, max_size=80))
def test_steady_norms_are_never_spikes(norms: list[float]) -> None:
    guard = SpikeGuard(2.0)
    assert all(guard.excess(norm) == 0 for norm in norms)
