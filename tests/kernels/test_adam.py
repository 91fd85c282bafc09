"""Each back end of Adam against its formula: relative error by the type of the moments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.kernels.adam import BACKENDS, AdamOptions, AdamState, adam_

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


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_elements_are_no_work(backend: str) -> None:
    adam_(_state(0, torch.float32, 1, has_weight=False), OPTIONS, backend=backend)
