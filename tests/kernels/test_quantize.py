"""What quantizing stores, against torch's own small types and the formulas of each recipe."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from moeplan.kernels.quantize_reference import E2M1_VALUES, dequantize, hadamard, packed, quantize
from moeplan.kernels.recipes import LARGEST, RECIPES, Element, Recipe

# Largest distance of a number from what is stored over the number itself: half a step of 3, 2 and 1 bits of mantissa.
ROUNDING = {"e4m3": 2**-4, "e5m2": 2**-3, "e2m1": 0.25}
numbers = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=70)


def _elements(recipe: Recipe) -> tuple[Element, Element]:
    return recipe.element, recipe.grad_element


def _scales(x_N: Tensor, name: str, element: Element) -> Tensor:
    """What each stored number is multiplied by."""
    stored = quantize(x_N, element, RECIPES[name].scaling)
    scale = stored.scale.float() if stored.tensor_scale is None else stored.scale.float() * stored.tensor_scale
    block = RECIPES[name].scaling.block
    return scale.expand(len(x_N)) if block is None else scale.repeat_interleave(block)[: len(x_N)]


def _slack(x_N: Tensor, scale_N: Tensor, name: str, element: Element) -> Tensor:
    """By how much a scale may be too small: NVFP4's block scales are rounded to e4m3 themselves.

    Down by as much as 2**-4 of them, or by half a step of 2**-9 where they are subnormal.
    """
    tensor_scale = quantize(x_N, element, RECIPES[name].scaling).tensor_scale
    if tensor_scale is None:
        return torch.full_like(scale_N, 1 + 1e-6)
    return 1 + (tensor_scale * 2**-10 / scale_N.clamp(min=1e-30)).clamp(min=2**-4)


@pytest.mark.parametrize("name", RECIPES)
@given(numbers)
@example([0.0] * 15 + [8823.0, 0.25])
def test_scales_cover_the_largest_number_and_rounding_is_half_a_step(name: str, values: list[float]) -> None:
    x_N = torch.tensor(values)
    for element in _elements(RECIPES[name]):
        read_N = dequantize(quantize(x_N, element, RECIPES[name].scaling))
        scale_N = _scales(x_N, name, element)
        assert read_N.isfinite().all()
        slack_N = _slack(x_N, scale_N, name, element)
        assert (x_N.abs() <= scale_N * LARGEST[element] * slack_N + 1e-30).all()
        smallest = {"e4m3": 2**-9, "e5m2": 2**-16, "e2m1": 0.5}[element]
        bound_N = torch.maximum(x_N.abs() * ROUNDING[element], scale_N * smallest / 2)
        assert ((read_N - x_N).abs() <= bound_N * slack_N + 1e-28).all()


@given(numbers)
def test_per_tensor_numbers_are_torchs_own(values: list[float]) -> None:
    x_N = torch.tensor(values)
    for element, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        stored = quantize(x_N, element, RECIPES["fp8_current"].scaling)  # type: ignore[arg-type]
        amax = x_N.abs().amax()
        inverse = torch.tensor(torch.finfo(dtype).max) / amax if amax > 1e-30 else torch.tensor(1.0)
        assert stored.data.dtype == dtype
        assert torch.equal(
            stored.data.view(torch.uint8),
            (x_N * inverse).clamp(min=-torch.finfo(dtype).max, max=torch.finfo(dtype).max).to(dtype).view(torch.uint8),
        )


def test_scales_of_mxfp8_are_powers_of_two_in_e8m0() -> None:
    x_N = torch.cat([torch.full((32,), 448.0), torch.full((32,), 449.0), torch.zeros(32), torch.full((5,), 2.0**-20)])
    scale_B = quantize(x_N, "e4m3", RECIPES["mxfp8"].scaling).scale
    assert scale_B.dtype == torch.float8_e8m0fnu
    assert scale_B.float().tolist() == [1.0, 2.0, 1.0, 2.0**-28]


def test_a_scale_of_mxfp8_covers_what_lies_just_above_a_power_of_two() -> None:
    """The logarithm of 1 + 2**-20 times 2**100 is 100 in fp32."""
    x_N = torch.full((32,), 448 * 2.0**100 * (1 + 2.0**-20))
    assert quantize(x_N, "e4m3", RECIPES["mxfp8"].scaling).scale.float().item() == 2.0**101


def test_halfway_goes_to_the_even_code_in_e2m1() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    # The block's scale is one: its largest is 6, and so is the tensor's over 448 blocks' worth.
    stored = quantize(torch.cat([middles, -middles]), "e2m1", RECIPES["nvfp4"].scaling)
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    torch.testing.assert_close(dequantize(stored), torch.cat([expected, -expected]), rtol=1e-6, atol=0)


def test_two_codes_of_e2m1_go_into_a_byte() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert packed(codes).dtype == torch.float4_e2m1fn_x2
    assert packed(codes).view(torch.uint8).tolist() == [low + 16 * (low + 1) for low in range(0, 16, 2)]


def test_stochastic_rounding_keeps_the_mean_and_hits_neighbours_alone() -> None:
    torch.manual_seed(0)
    x_N = torch.full((40_000,), 2.25)
    x_N[::16] = 6.0
    read_N = dequantize(quantize(x_N, "e2m1", RECIPES["nvfp4"].scaling, stochastic=True))
    others = read_N[x_N == 2.25]
    torch.testing.assert_close(others.unique(), torch.tensor([2.0, 3.0]), rtol=1e-5, atol=0)
    assert float(others.mean()) == pytest.approx(2.25, abs=0.01)  # its deviation is 0.0022


def test_weights_share_scales_in_both_dimensions() -> None:
    weight_EAB = torch.randn(2, 256, 384, generator=torch.Generator().manual_seed(0))
    weight_EAB[1, 130, 200] = 100.0
    scaling = RECIPES["fp8_blockwise"].scaling
    scale = quantize(weight_EAB, "e4m3", scaling, is_weight=True).scale
    turned = quantize(weight_EAB.transpose(1, 2), "e4m3", scaling, is_weight=True).scale
    assert scale.shape == (2, 256, 3)
    assert torch.equal(scale[:, ::128], turned[:, ::128].transpose(1, 2))
    assert float(scale[1, 128, 1]) == pytest.approx(100 / 448)
    per_expert = quantize(weight_EAB, "e4m3", RECIPES["fp8_current"].scaling, is_weight=True).scale
    assert per_expert.shape == (2,)


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_and_nothing_stay(name: str) -> None:
    for element in _elements(RECIPES[name]):
        assert dequantize(quantize(torch.zeros(3, 40), element, RECIPES[name].scaling)).tolist() == [[0.0] * 40] * 3
        assert dequantize(quantize(torch.zeros(0, 40), element, RECIPES[name].scaling)).shape == (0, 40)


def test_an_older_magnitude_cuts_what_it_does_not_cover() -> None:
    stored = quantize(torch.tensor([1.0, 8.0]), "e4m3", RECIPES["fp8_delayed"].scaling, amax=torch.tensor(2.0))
    assert dequantize(stored).tolist() == pytest.approx([1.0, 2.0])


@given(st.integers(1, 70))
def test_the_hadamard_transform_keeps_products(num: int) -> None:
    generator = torch.Generator().manual_seed(num)
    a_MN, b_ON = torch.randn(3, num, generator=generator), torch.randn(4, num, generator=generator)
    torch.testing.assert_close(hadamard(a_MN, 16) @ hadamard(b_ON, 16).t(), a_MN @ b_ON.t(), rtol=1e-4, atol=1e-4)
    assert E2M1_VALUES[-1] == LARGEST["e2m1"]
