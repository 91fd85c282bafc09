"""Each back end of Adam against its formula: relative error by the type of the moments."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.kernels import adam
from moeplan.kernels.adam import BACKENDS, AdamOptions, AdamState, adam_
from moeplan.kernels.remainders import join, split_

OPTIONS = AdamOptions(lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_scale=0.5)
# fp32: one rounding an operation. bf16: the moments are rounded after the step, which the next one reads.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")


def _state(N: int, moment: torch.dtype, steps: int, *, has_weight: bool) -> AdamState:
    generator = torch.Generator().manual_seed(N)
    main_N, grad_N, first_N = (torch.randn(N, generator=generator) for _ in range(3))
    second_N = torch.rand(N, generator=generator)
    weight_N = main_N.bfloat16() if has_weight else None
    return AdamState(main_N, grad_N, first_N.to(moment), second_N.to(moment), torch.tensor(float(steps)), weight_N)


def test_a_step_done_by_hand() -> None:
    one = torch.ones(1)
    state = AdamState(one.clone(), 2 * one, torch.zeros(1), torch.zeros(1), torch.tensor(1.0))
    adam_(state, AdamOptions(lr=0.1, beta1=0.9, beta2=0.99, eps=0.0, weight_decay=0.5))
    # The first step of Adam goes by lr in the direction of the gradient: 1 - 0.1 * (0.5 * 1 + 1).
    assert state.main_N.item() == pytest.approx(0.85)
    assert state.first_N.item() == pytest.approx(0.2)
    assert state.second_N.item() == pytest.approx(0.04)


@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", sorted(BACKENDS))
@settings(max_examples=8, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 1000), st.booleans())
def test_every_back_end_takes_the_step_of_the_formula(
    backend: str, moment: torch.dtype, N: int, steps: int, has_weight: bool
) -> None:
    got, expected = (_state(N, moment, steps, has_weight=has_weight) for _ in range(2))
    adam_(got, OPTIONS, backend=backend)
    adam_(expected, OPTIONS, backend="reference")
    torch.testing.assert_close(got.main_N, expected.main_N, rtol=1e-5, atol=1e-6)
    for one, other in ((got.first_N, expected.first_N), (got.second_N, expected.second_N)):
        assert one.dtype == moment
        torch.testing.assert_close(one, other, rtol=TOLERANCE[moment], atol=1e-6)
    if got.weight_N is not None:
        # Triton's interpreter cuts the bits off that a GPU and torch round: one part in 2**7 at most.
        torch.testing.assert_close(got.weight_N.float(), got.main_N, rtol=2**-7, atol=0)


@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", sorted(BACKENDS))
@settings(max_examples=8, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 1000))
def test_main_weights_in_halves_take_the_step_of_whole_ones(
    backend: str, moment: torch.dtype, N: int, steps: int
) -> None:
    got, expected = (_state(N, moment, steps, has_weight=False) for _ in range(2))
    got = in_halves(got)
    for _ in range(2):  # the second reads what the first split
        adam_(got, OPTIONS, backend=backend)
        adam_(expected, OPTIONS, backend=backend)
    assert got.remainder_N is not None
    assert torch.equal(join(got.main_N, got.remainder_N), expected.main_N)
    assert torch.equal(got.first_N, expected.first_N)
    assert torch.equal(got.second_N, expected.second_N)
    halves = got.main_N.clone(), got.remainder_N.clone()
    split_(expected.main_N, *halves)
    assert torch.equal(got.main_N, halves[0])
    assert torch.equal(got.remainder_N, halves[1])


def in_halves(state: AdamState) -> AdamState:
    weight_N, remainder_N = torch.empty_like(state.main_N, dtype=torch.bfloat16), state.main_N.to(torch.int16)
    split_(state.main_N, weight_N, remainder_N)
    return replace(state, main_N=weight_N, weight_N=None, remainder_N=remainder_N)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20))
def test_every_fp32_value_is_joined_as_it_was_split(bits: list[int]) -> None:
    main_N = torch.tensor(bits, dtype=torch.int32).view(torch.float32)  # NaN and infinities among them
    weight_N, remainder_N = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    split_(main_N, weight_N, remainder_N)
    assert join(weight_N, remainder_N).view(torch.int32).tolist() == bits


def test_stretches_that_are_joined_in_turn_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = (in_halves(_state(1000, torch.float32, 3, has_weight=False)) for _ in range(2))
    adam_(whole, OPTIONS, backend="reference")
    monkeypatch.setattr(adam, "STRETCH", 96)
    adam_(cut, OPTIONS, backend="reference")
    for one, other in ((whole.main_N, cut.main_N), (whole.remainder_N, cut.remainder_N)):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_more_elements_than_32_bits_count() -> None:
    from triton import language as tl

    from moeplan.kernels import adam_triton

    main_N, grad_N, first_N, second_N = torch.ones(4, 2048)  # the first program's part of 2**31 + 16 elements
    state = (main_N, grad_N, first_N, second_N, main_N, main_N, torch.ones(2, dtype=torch.float64), 2**28 + 2)
    adam_triton._step[1,](*state, 0.1, 0.9, 0.95, 1e-8, 0.1, 1.0, False, False, tl.float32, 8, 2048)
    torch.testing.assert_close(main_N, torch.full((2048,), 1 - 0.1 * (0.1 + 1)))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_elements_are_no_work(backend: str) -> None:
    none = _state(0, torch.float32, 1, has_weight=False)
    adam_(none, OPTIONS, backend=backend)
    adam_(in_halves(none), OPTIONS, backend=backend)
