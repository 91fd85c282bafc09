import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.kernels.rotary import apply_rotary, rotary_tables


def test_tables_of_a_case_done_by_hand() -> None:
    cos, sin = rotary_tables(torch.tensor([0, 3]), 4, 100.0, torch.float64)
    # Frequencies 100**0 and 100**(-2/4) = 0.1.
    torch.testing.assert_close(cos, torch.tensor([[1.0, 1.0], [math.cos(3), math.cos(0.3)]], dtype=torch.float64))
    torch.testing.assert_close(sin, torch.tensor([[0.0, 0.0], [math.sin(3), math.sin(0.3)]], dtype=torch.float64))


def test_a_quarter_turn_swaps_the_halves() -> None:
    x_BLND = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    y_BLND = apply_rotary(x_BLND, torch.zeros(1, 2), torch.ones(1, 2))
    assert y_BLND.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_scores_depend_on_the_distance_alone(position: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 2, 3, 8, generator=generator, dtype=torch.float64)

    def score(first: int) -> torch.Tensor:
        cos, sin = rotary_tables(torch.tensor([first, first + 7]), 8, 10_000.0, torch.float64)
        return torch.einsum("blnd,bmnd->bnlm", apply_rotary(query, cos, sin), apply_rotary(key, cos, sin))

    torch.testing.assert_close(score(position), score(position + shift), rtol=1e-8, atol=1e-8)


def test_gradients_are_exact_and_dtype_is_kept() -> None:
    cos, sin = rotary_tables(torch.arange(3), 4, 100.0, torch.float64)
    x_BLND = torch.randn(1, 3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, cos, sin), (x_BLND.requires_grad_(),))
    assert apply_rotary(x_BLND.bfloat16(), cos, sin).dtype == torch.bfloat16
