"""That long gradients in FP8 are summed in two levels: 14 bits inside 128 products, fp32 between.

Tensor cores are emulated, mostly on factors whose mean is half their deviation, as activations may have it: sums that
stay in 14 bits then lose what is small beside them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeplan.kernels import grouped_gemm_fp8_triton
from moeplan.kernels import quantized_gemm_triton as backend
from moeplan.kernels.padded_rows import dense_rows, padded_rows
from moeplan.kernels.quantized_gemm import QuantizedOperands, Stored
from moeplan.kernels.recipes import RECIPES
from tests.kernels.hopper_sums import add_products, hopper_dots, matmul

RECIPE = RECIPES["fp8_current"]
ROWS, WIDTH = backend.MAX_ROWS_OF_ONE_LEVEL, backend.MAX_WIDTH_OF_ONE_LEVEL


def test_an_addend_beyond_14_bits_is_cut_off() -> None:
    one = torch.ones(1, 32)
    assert add_products(torch.full((1, 1), 2.0**13), one, one.t()).item() == 2.0**13 + 32
    assert add_products(torch.full((1, 1), 2.0**14), one, one.t()).item() == 2.0**14
    assert add_products(torch.full((1, 1), -(2.0**14)), 3 * one, one.t()).item() == -(2.0**14) + 2 * 32


def _values(rows: int, cols: int, dtype: torch.dtype, mean: float = 0.5) -> Tensor:
    """Numbers whose largest is the largest of ``dtype``, not rounded yet."""
    generator = torch.Generator().manual_seed(int(torch.finfo(dtype).max))
    values = torch.randn(rows, cols, generator=generator) + mean
    return values * torch.finfo(dtype).max / values.abs().amax()


def _operand(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return _values(rows, cols, dtype).to(dtype)


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def test_two_levels_lose_a_hundredth_of_one() -> None:
    a_MK, b_NK = (_operand(8, 8192, dtype).float() for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
    exact = a_MK.double() @ b_NK.double().t()
    one, two = (_relative(matmul(a_MK, b_NK.t(), every), exact) for every in (None, 128))
    assert one > 5e-3
    assert two < 5e-5


@pytest.mark.parametrize(
    "num_products, mean, error, rounding",
    [(ROWS, 0.0, 1.5e-3, 5.8e-2), (ROWS, 0.5, 1.0e-2, 5.0e-3), (WIDTH, 0.0, 4.4e-3, 6.2e-2)],
)
def test_one_level_up_to_the_limits_loses_what_is_said_there(
    num_products: int, mean: float, error: float, rounding: float
) -> None:
    dtypes = torch.float8_e4m3fn, torch.float8_e5m2
    values = [_values(24, num_products, dtype, mean).double() for dtype in dtypes]
    a_MK, b_NK = (one.to(dtype).double() for one, dtype in zip(values, dtypes, strict=True))
    exact = a_MK @ b_NK.t()
    assert _relative(matmul(a_MK, b_NK.t(), None), exact) == pytest.approx(error, rel=0.15)
    assert _relative(exact, values[0] @ values[1].t()) == pytest.approx(rounding, rel=0.15)


class _Splits(list[bool]):
    """Whether each GEMM was to be summed in two levels."""

    def record(self, *_args: Any, split: bool, **_options: Any) -> None:
        self.append(split)


# Experts, their rows, width of tokens and of one expert (twice in the first matrix): whether the input gradients of
# both matrices, the weight gradients and those of two micro-batches at once are summed in two levels.
SHAPES = {
    "h200-coarse": ((8, 32768, 4096, 14336), (False, False, False, True)),
    "h200-deepseek": ((64, 131072, 4096, 1536), (False, False, False, False)),
    "at the limits": ((2, 2 * ROWS, WIDTH, WIDTH // 2), (False, False, False, True)),
    "beyond them": ((2, 2 * ROWS + 2, WIDTH + 128, WIDTH // 2 + 64), (True, True, True, True)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_only_gradients_of_many_products_are_summed_in_two_levels(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    (num_experts, num_rows, hidden, width), expected = SHAPES[shape]
    splits = _Splits()
    monkeypatch.setattr(grouped_gemm_fp8_triton, "rows_gemm", splits.record)
    monkeypatch.setattr(grouped_gemm_fp8_triton, "gradient_gemm_", splits.record)
    rows = padded_rows(torch.arange(1, num_experts + 1, dtype=torch.int32) * (num_rows // num_experts), num_rows)

    def stored(*shape: int) -> Stored:
        return torch.empty(shape, device="meta"), torch.ones(()), None

    for is_gradient in (True, False):
        for summed, other in ((2 * width, hidden), (hidden, width)):
            x, weight = stored(rows.num_padded, summed), stored(num_experts, other, summed)
            backend.multiply(x, weight, rows, RECIPE, is_gradient=is_gradient)
            backend.multiply(x, weight, rows, RECIPES["fp8_blockwise"], is_gradient=is_gradient)
    total_EMN = torch.empty(num_experts, hidden, width, device="meta")
    operands = QuantizedOperands(stored(hidden, rows.num_padded), stored(width, rows.num_padded), rows)
    backend.gradient_(total_EMN, (operands,), RECIPE, add=True)
    backend.gradient_(total_EMN, (operands, operands), RECIPE, add=True)
    first, second, weights, pair = expected
    assert splits == [first, False, second, False] + 4 * [False] + [weights, pair]


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
@pytest.mark.parametrize(
    "num_products, is_gradient, every",
    [(8320, False, None), (8192, True, None), (8320, True, 128)],
)
def test_outputs_and_short_gradients_are_summed_in_one_level_and_long_ones_in_two(
    monkeypatch: pytest.MonkeyPatch, num_products: int, is_gradient: bool, every: int | None
) -> None:
    monkeypatch.setattr(backend, "MAX_WIDTH_OF_ONE_LEVEL", 8192)  # the interpreter takes its time
    x_PK, weight_NK = _operand(128, num_products, torch.float8_e5m2), _operand(16, num_products, torch.float8_e4m3fn)
    rows, weight = dense_rows(128, x_PK.device), _stored(weight_NK[None])
    y_RN = backend.multiply(_stored(x_PK), weight, rows, RECIPE, is_gradient=is_gradient)
    one, two = (matmul(x_PK.float(), weight_NK.float().t(), width) for width in (None, 128))
    expected, other = (one, two) if every is None else (two, one)
    assert _relative(y_RN, expected) < 2**-8  # bf16, cut by the interpreter
    assert _relative(y_RN, other) > 1.5 * 2**-8


@pytest.mark.usefixtures("narrow_tiles")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("num_rows, every", [(ROWS, None), (ROWS + 128, 128)])
def test_weight_gradients_over_many_rows_are_summed_in_two_levels(add: bool, num_rows: int, every: int | None) -> None:
    a_MP, b_NP = _operand(128, num_rows, torch.float8_e4m3fn), _operand(16, num_rows, torch.float8_e5m2)
    total_EMN = torch.zeros(1, 128, 16)
    operands = QuantizedOperands(_stored(a_MP), _stored(b_NP), dense_rows(num_rows, a_MP.device))
    backend.gradient_(total_EMN, (operands,), RECIPE, add=add)
    torch.testing.assert_close(total_EMN[0], matmul(a_MP.float(), b_NP.float().t(), every), rtol=1e-6, atol=0)
