"""Quantized GEMMs by Triton: FP8 with a scale a tensor or a block of 128, on Hopper or later.

One expert with one scale a tensor goes to cuBLAS, forward and for input gradients: 1360 TFLOP/s of 1290 (one H200).
With one scale a tensor Hopper sums in its tensor cores' 14 bits; in two levels gradients of weights over many rows, and
in cuBLAS every input gradient, as Transformer Engine does by default. Blackwell's keep fp32: nothing is split there.

Shapes: R rows sorted by expert, P padded rows, C columns, E experts, A and B sides of a weight, M and N of a gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moeplan.kernels import grouped_gemm_fp8_triton, quantize_triton, quantize_weights_triton
from moeplan.kernels.padded_rows import PaddedRows
from moeplan.kernels.quantize_reference import DTYPES, scale_of
from moeplan.kernels.quantized_gemm import Pair, QuantizedOperands, Stored
from moeplan.kernels.recipes import Recipe
from moeplan.kernels.row_map import RowMap

amax = quantize_triton.amax

# Most products of a gradient that Triton sums in 14 bits alone (tests/kernels/hopper_sums.py). Of a weight, rows of one
# expert, both micro-batches' where two are added at once: of 6144 that loses 1.5e-3 of its norm, rounding the operands
# to FP8 5.8e-2; where both have a mean of half their deviation 1.0e-2 and 5.0e-3. Of an input, whose one operand is
# weights, without a mean: 4.4e-3 of 32,768.
MAX_ROWS_OF_ONE_LEVEL = 6144
MAX_WIDTH_OF_ONE_LEVEL = 32_768


def quantize_rows(
    x_RC: Tensor, rows: PaddedRows, recipe: Recipe, *, is_gradient: bool, amax: Tensor | None = None,
    copied: RowMap | None = None,
) -> Pair:  # fmt: skip
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    dtype = DTYPES[recipe.grad_element if is_gradient else recipe.element]
    if recipe.scaling.block is None and amax is None:
        amax = quantize_triton.amax(x_RC)
    return quantize_triton.quantize_rows(x_RC, rows, dtype, amax, copied)


def weight_amax(weight_EAB: Tensor, recipe: Recipe) -> Tensor:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    return quantize_weights_triton.weight_amax(weight_EAB, blockwise=recipe.scaling.block is not None)


def quantize_weights(weight_EAB: Tensor, recipe: Recipe, amax: Tensor | None = None) -> Pair:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    blockwise = recipe.scaling.block is not None
    return quantize_weights_triton.quantize_weights(weight_EAB, DTYPES[recipe.element], blockwise=blockwise, amax=amax)


def weight_scales(amax: Tensor, shape: tuple[int, ...], recipe: Recipe) -> tuple[Tensor, Tensor]:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    scale = scale_of(amax, recipe.element)
    return scale, scale if recipe.scaling.block is None else scale.transpose(1, 2).contiguous()


def multiply(x: Stored, weight: Stored, rows: PaddedRows, recipe: Recipe, *, is_gradient: bool = False) -> Tensor:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    (x_PB, scale_x, _), (weight_EAB, scale_E, _) = x, weight
    blockwise = recipe.scaling.block is not None
    if len(weight_EAB) == 1 and not blockwise and x_PB.is_cuda and rows.num_rows:
        y_PA = torch._scaled_mm(  # noqa: SLF001 - torch has no public name for it
            x_PB, weight_EAB[0].t(), scale_x, scale_E[0], out_dtype=torch.bfloat16,
            use_fast_accum=_sums_short(x_PB) and not is_gradient,
        )  # fmt: skip
        return y_PA[: rows.num_rows]
    split = is_gradient and not blockwise and _sums_short(x_PB) and x_PB.shape[1] > MAX_WIDTH_OF_ONE_LEVEL
    return grouped_gemm_fp8_triton.rows_gemm(x_PB, scale_x, weight_EAB, scale_E, rows, blockwise=blockwise, split=split)


def gradient_(total_EMN: Tensor, parts: Sequence[QuantizedOperands], recipe: Recipe, *, add: bool) -> None:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    blockwise = recipe.scaling.block is not None
    # On average: how many rows an expert has is known to the device alone. Those of all parts go into one sum.
    num_rows = sum(part.rows.num_rows for part in parts) / len(total_EMN)
    split = not blockwise and _sums_short(total_EMN) and num_rows > MAX_ROWS_OF_ONE_LEVEL
    grouped_gemm_fp8_triton.gradient_gemm_(total_EMN, parts, add=add, blockwise=blockwise, split=split)


def _sums_short(x: Tensor) -> bool:
    """Whether tensor cores add FP8 products in fewer bits than fp32: Hopper's, for which the interpreter stands."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] == 9
