"""Quantized GEMMs of torch on Blackwell: MXFP8 and NVFP4 by the tensor cores that know their scales.

One expert goes to ``torch.nn.functional.scaled_mm`` (cuBLAS), several to ``scaled_grouped_mm``, whose groups end where
padded rows do, so no host waits for the routing. What is stored is the reference's to the bit, in the layout that the
kernels want: E2M1 codes two a byte, scales in tiles (:mod:`moeplan.kernels.scale_tiles`). On a GPU one Triton kernel
quantizes to MXFP8; NVFP4 takes some passes of plain torch. Sums are in fp32; weight gradients of experts leave in bf16,
the only type of the grouped kernel.

Shapes: R rows sorted by expert, P padded rows, C columns, E experts, A and B sides of a weight, M and N of a gradient.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.kernels import quantized_gemm_reference as reference
from moeplan.kernels.padded_rows import PaddedRows
from moeplan.kernels.permute import permute
from moeplan.kernels.quantize_reference import packed
from moeplan.kernels.quantized_gemm import Pair, QuantizedOperands, Stored
from moeplan.kernels.recipes import Recipe
from moeplan.kernels.row_map import RowMap
from moeplan.kernels.scale_tiles import tiled, tiled_by_expert

ALIGNMENT = 32  # both sides of a weight: 16 bytes of E2M1
MAX_EXPERTS = 1024  # one thread of a block prepares the arguments of one group

amax = reference.amax
weight_amax = reference.weight_amax
weight_scales = reference.weight_scales


@cache
def has_grouped_kernels() -> bool:
    """Whether this torch was built with the library of its block-scaled grouped GEMMs."""
    config = torch.__config__.show()
    return "USE_MSLK" in config or "USE_FBGEMM_GENAI" in config


def quantize_rows(
    x_RC: Tensor, rows: PaddedRows, recipe: Recipe, *, is_gradient: bool, amax: Tensor | None = None,
    copied: RowMap | None = None,
) -> Pair:  # fmt: skip
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    if copied is not None:
        x_RC = permute(x_RC, copied)
    if x_RC.is_cuda and recipe.scaling.scale == "e8m0":
        from moeplan.kernels import quantize_mxfp8_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

        return quantize_mxfp8_triton.quantize_rows(x_RC, rows)
    as_is, turned = reference.quantize_rows(x_RC, rows, recipe, is_gradient=is_gradient, amax=amax)
    if not rows.num_tiles:
        return Pair(as_is, turned)
    num = len(rows.padded_end_E)
    turned_scale = tiled(turned[1]) if num == 1 else tiled_by_expert(turned[1], rows)
    return Pair(
        (_codes(as_is[0]), tiled(as_is[1]), _for_each(as_is[2], num)),
        (_codes(turned[0]), turned_scale, _for_each(turned[2], num)),
    )


def quantize_weights(weight_EAB: Tensor, recipe: Recipe, amax: Tensor | None = None) -> Pair:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    if weight_EAB.is_cuda and recipe.scaling.scale == "e8m0":
        from moeplan.kernels import quantize_mxfp8_triton  # noqa: PLC0415 - as above

        return quantize_mxfp8_triton.quantize_weights(weight_EAB)
    pair = reference.quantize_weights(weight_EAB, recipe, amax)
    as_is, turned = ((_codes(data), tiled(scale).flatten(1), above) for data, scale, above in pair)
    return Pair(as_is, turned)


def multiply(x: Stored, weight: Stored, rows: PaddedRows, recipe: Recipe, *, is_gradient: bool = False) -> Tensor:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`."""
    weight_EAB, scale_E, above_E = weight
    num, width = weight_EAB.shape[:2]
    if not rows.num_tiles:
        return x[0].new_empty((0, width), dtype=torch.bfloat16)
    if num == 1:
        one = (weight_EAB[0], scale_E[0], above_E)
        return _scaled_mm(x, one, torch.bfloat16)[: rows.num_rows]
    y_PA = _scaled_grouped_mm(x, weight, rows)
    y_RA = y_PA.new_empty((rows.num_rows + 1, width))  # padding goes to one more row
    y_RA[rows.source_P] = y_PA
    return y_RA[:-1]


def gradient_(total_EMN: Tensor, parts: Sequence[QuantizedOperands], recipe: Recipe, *, add: bool) -> None:
    """See :class:`moeplan.kernels.quantized_gemm.QuantizedGemm`. Parts are added one by one."""
    for part in parts:
        _add_or_put(total_EMN, part, add=add)
        add = True


def _add_or_put(total_EMN: Tensor, part: QuantizedOperands, *, add: bool) -> None:
    a, b, rows = part
    if not rows.num_tiles:
        if not add:
            total_EMN.zero_()
        return
    if len(total_EMN) == 1:
        product_EMN = _scaled_mm(a, b, torch.float32)[None]
    else:
        product_EMN = _scaled_grouped_mm(a, b, rows)
        # The kernel writes nothing for a group without rows.
        counts_E = torch.diff(rows.padded_end_E, prepend=rows.padded_end_E.new_zeros(1))
        product_EMN.masked_fill_((counts_E == 0)[:, None, None], 0.0)
    if add:
        total_EMN.add_(product_EMN)
    else:
        total_EMN.copy_(product_EMN)


def _scaled_mm(a: Stored, b: Stored, dtype: torch.dtype) -> Tensor:
    """Product [M, N] of [M, K] and [N, K]."""
    how = _scales(a, b)
    product_MN: Tensor = F.scaled_mm(
        a[0], b[0].t(), how.a, how.recipe, how.b, how.recipe, _SWIZZLE, _SWIZZLE, output_dtype=dtype
    )
    return product_MN


def _scaled_grouped_mm(a: Stored, b: Stored, rows: PaddedRows) -> Tensor:
    """Rows [P, K] times each expert's [E, N, K]; or [M, P] and [N, P] of whose P each expert has some, [E, M, N]."""
    how = _scales(a, b)
    # torch's stubs lack it.
    product: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a[0], b[0].transpose(-2, -1), how.a, how.recipe, how.b, how.recipe, _SWIZZLE, _SWIZZLE,
        offs=rows.padded_end_E, output_dtype=torch.bfloat16,
    )  # fmt: skip
    return product


_SWIZZLE = F.SwizzleType.SWIZZLE_32_4_4


class _Scales(NamedTuple):
    a: list[Tensor]
    b: list[Tensor]
    recipe: list[F.ScalingType]


def _scales(a: Stored, b: Stored) -> _Scales:
    if a[2] is None or b[2] is None:
        return _Scales([a[1]], [b[1]], [F.ScalingType.BlockWise1x32])
    return _Scales([a[1], a[2]], [b[1], b[2]], [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise])


def _codes(data: Tensor) -> Tensor:
    return packed(data) if data.dtype == torch.uint8 else data.contiguous()


def _for_each(above: Tensor | None, num: int) -> Tensor | None:
    """The scale above blocks' scales for every expert, which share it where rows were quantized together."""
    return None if above is None else above.expand(num).contiguous()
