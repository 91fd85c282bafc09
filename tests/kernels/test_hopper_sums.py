"""That gradients in FP8 are summed in two levels: 14 bits inside 128 products, fp32 between.

Tensor cores are emulated, on factors whose mean is half their deviation, as activations may have it: sums that stay in
14 bits then lose what is small beside them.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moeplan.kernels import grouped_gemm_fp8_triton
from moeplan.kernels import quantized_gemm_triton as backend
from moeplan.kernels.padded_rows import dense_rows
from moeplan.kernels.quantized_gemm import Stored
from moeplan.kernels.recipes import RECIPES
from tests.kernels.hopper_sums import add_products, hopper_dots, matmul

RECIPE = RECIPES["fp8_current"]


def test_an_addend_beyond_14_bits_is_cut_off() -> None:
    one = torch.ones(1, 32)
    assert add_products(torch.full((1, 1), 2.0**13), one, one.t()).item() == 2.0**13 + 32
    assert add_products(torch.full((1, 1), 2.0**14), one, one.t()).item() == 2.0**14
    assert add_products(torch.full((1, 1), -(2.0**14)), 3 * one, one.t()).item() == -(2.0**14) + 2 * 32


def _operand(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(int(torch.finfo(dtype).max))
    values = torch.randn(rows, cols, generator=generator) + 0.5
    return (values * torch.finfo(dtype).max / values.abs().amax()).to(dtype)


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def test_two_levels_lose_a_hundredth_of_one() -> None:
    a_MK, b_NK = (_operand(8, 8192, dtype).float() for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
    exact = a_MK.double() @ b_NK.double().t()
    one, two = (_relative(matmul(a_MK, b_NK.t(), every), exact) for every in (None, 128))
    assert one > 5e-3
    assert two < 5e-5


@pytest.fixture
def narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of 16 columns, or the interpreter would take minutes; the rest as they are."""
    for name in ("ROWS", "GRADIENT", "TWO_ACCUMULATORS"):
        tiling = getattr(grouped_gemm_fp8_triton, name)
        monkeypatch.setattr(grouped_gemm_fp8_triton, name, replace(tiling, block_n=16))
    with hopper_dots():
        yield


def _stored(data: Tensor) -> Stored:
    return data, torch.ones(() if data.dim() == 2 else len(data)), None


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_quantized_on_gpu.py")


@pytest.mark.usefixtures("narrow_tiles")
def test_outputs_are_summed_in_one_level_and_their_gradients_in_two() -> None:
    x_PK, weight_NK = _operand(128, 8192, torch.float8_e5m2), _operand(16, 8192, torch.float8_e4m3fn)
    rows, weight = dense_rows(128, x_PK.device), _stored(weight_NK[None])
    for is_gradient, every in ((False, None), (True, 128)):
        y_RN = backend.multiply(_stored(x_PK), weight, rows, RECIPE, is_gradient=is_gradient)
        expected = matmul(x_PK.float(), weight_NK.float().t(), every)
        assert _relative(y_RN, expected) < 2**-8  # bf16, cut by the interpreter
        exact = x_PK.double() @ weight_NK.double().t()
        assert _relative(expected, exact) > 1e-2 or is_gradient


@pytest.mark.usefixtures("narrow_tiles")
@pytest.mark.parametrize("add", [False, True])
def test_weight_gradients_are_summed_in_two_levels(add: bool) -> None:
    a_MP, b_NP = _operand(128, 1024, torch.float8_e4m3fn), _operand(16, 1024, torch.float8_e5m2)
    total_EMN = torch.zeros(1, 128, 16)
    backend.gradient_(total_EMN, _stored(a_MP), _stored(b_NP), dense_rows(1024, a_MP.device), RECIPE, add=add)
    torch.testing.assert_close(total_EMN[0], matmul(a_MP.float(), b_NP.float().t(), 128), rtol=1e-6, atol=0)
