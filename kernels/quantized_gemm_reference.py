"""Quantized GEMMs as products of what is stored, read back in fp32: any device and recipe. Copies offsets to the host.

Shapes: R rows sorted by expert, P padded rows, C columns, E experts, A and B sides of a weight, M and N of a gradient.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from moeplan.kernels.padded_rows import PaddedRows
from moeplan.kernels.quantize_reference import Quantized, block_amax, dequantize, hadamard, quantize, scale_of
from moeplan.kernels.quantized_gemm import Pair, QuantizedOperands, Stored
from moeplan.kernels.recipes import Recipe
from moeplan.kernels.row_map import RowMap


def amax(x: Tensor) -> Tensor:
    """The largest magnitude, fp32."""
    return x.abs().amax().to(torch.float32) if x.numel() else torch.zeros((), device=x.device)


def quantize_rows(
    x_RC: Tensor, rows: PaddedRows, recipe: Recipe, *, is_gradient: bool, amax: Tensor | None = None,
    copied: RowMap | None = None,
) -> Pair:  # fmt: skip
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    if copied is not None:
        x_RC = x_RC[copied.token_of_row_R]
    element = recipe.grad_element if is_gradient else recipe.element
    padded_PC = torch.cat([x_RC, x_RC.new_zeros(1, x_RC.shape[1])])[rows.source_P].to(torch.float32)
    turned_CP = padded_PC.t()
    if recipe.hadamard:
        turned_CP = hadamard(turned_CP, recipe.hadamard)
    stochastic = is_gradient and recipe.stochastic
    return Pair(
        *(
            _stored(quantize(one, element, recipe.scaling, amax=amax, stochastic=stochastic))
            for one in (padded_PC, turned_CP)
        )
    )


def weight_amax(weight_EAB: Tensor, recipe: Recipe) -> Tensor:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    return block_amax(weight_EAB.to(torch.bfloat16).to(torch.float32), recipe.scaling)


def quantize_weights(weight_EAB: Tensor, recipe: Recipe, amax: Tensor | None = None) -> Pair:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    weight_EAB = weight_EAB.to(torch.bfloat16)
    turned_amax = amax if amax is None or amax.dim() == 1 else amax.transpose(1, 2)
    both = ((weight_EAB, amax), (weight_EAB.transpose(1, 2), turned_amax))
    return Pair(
        *(_stored(quantize(one, recipe.element, recipe.scaling, is_weight=True, amax=given)) for one, given in both)
    )


def weight_scales(amax: Tensor, shape: tuple[int, ...], recipe: Recipe) -> tuple[Tensor, Tensor]:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    scale = scale_of(amax, recipe.element)
    if recipe.scaling.block is None:
        return scale, scale
    rows = recipe.scaling.weight_rows
    both = ((scale, shape[1]), (scale.transpose(1, 2), shape[2]))
    as_is, turned = (one.repeat_interleave(rows, 1)[:, :side] for one, side in both)
    return as_is, turned


def multiply(x: Stored, weight: Stored, rows: PaddedRows, recipe: Recipe, *, is_gradient: bool = False) -> Tensor:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    x_PB, weight_EAB = _read(x, recipe), _read(weight, recipe)
    y_RA = x_PB.new_empty((rows.num_rows + 1, weight_EAB.shape[1]))  # padding goes to one more row
    for weight_AB, (start, end) in zip(weight_EAB, _spans(rows), strict=True):
        y_RA[rows.source_P[start:end]] = x_PB[start:end] @ weight_AB.t()
    return y_RA[:-1].to(torch.bfloat16)


def gradient_(total_EMN: Tensor, parts: Sequence[QuantizedOperands], recipe: Recipe, *, add: bool) -> None:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`. Parts are added one by one."""
    for a, b, rows in parts:
        a_MP, b_NP = _read(a, recipe), _read(b, recipe)
        for total_MN, (start, end) in zip(total_EMN, _spans(rows), strict=True):
            product = a_MP[:, start:end] @ b_NP[:, start:end].t()
            if add:
                total_MN.add_(product)
            else:
                total_MN.copy_(product)
        add = True


def _stored(q: Quantized) -> Stored:
    return q.data, q.scale, q.tensor_scale


def _read(stored: Stored, recipe: Recipe) -> Tensor:
    data, scale, tensor_scale = stored
    is_e5m2 = data.dtype == torch.float8_e5m2
    return dequantize(Quantized(data, scale, tensor_scale, "e5m2" if is_e5m2 else recipe.element, recipe.scaling))


def _spans(rows: PaddedRows) -> list[tuple[int, int]]:
    return list(pairwise([0, *rows.padded_end_E.tolist()]))
