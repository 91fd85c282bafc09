"""Quantizing weights to FP8 in one pass: both layouts, with one scale an expert or one a block of 128 x 128.

Shapes: E experts, I and O sides of a weight, A and B sides of any.
"""
# ruff: noqa: ANN001, ANN201, ANN202, E741, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeplan.kernels.fp8_tile_triton import inverse_scale, stored
from moeplan.kernels.padded_rows import TILE
from moeplan.kernels.quantize_triton import AMAX_BLOCK, amax_of_parts
from moeplan.kernels.quantized_gemm import Pair


@triton.jit
def weight_tile(x_ptr, A, B, SIDE: tl.constexpr):
    """Where a program's expert of a weight [E, A, B] begins; its tile's place, rows, columns, mask and fp32 numbers.

    Those are numbers of bf16: what is wider is rounded here, so that no copy in bf16 is made before.
    """
    num_b = tl.cdiv(B, SIDE)
    a, b = tl.program_id(1) // num_b, tl.program_id(1) % num_b
    rows, cols = a * SIDE + tl.arange(0, SIDE), b * SIDE + tl.arange(0, SIDE)
    base = tl.program_id(0).to(tl.int64) * A * B
    mask = (rows < A)[:, None] & (cols < B)[None, :]
    x = tl.load(x_ptr + base + rows.to(tl.int64)[:, None] * B + cols[None, :], mask, 0)
    return base, a, b, rows, cols, mask, x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _tile_amax(x_ptr, amax_ptr, A, B, SIDE: tl.constexpr):
    _base, _a, _b, _rows, _cols, _mask, x = weight_tile(x_ptr, A, B, SIDE)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(amax_ptr + place, tl.max(tl.max(tl.abs(x), 1), 0))


@triton.jit
def _quantize_weights(
    x_ptr, amax_ptr, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, I, O,
    BLOCKWISE: tl.constexpr, HAS_AMAX: tl.constexpr, LARGEST: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    expert, num_o = tl.program_id(0), tl.cdiv(O, SIDE)
    base, i, o, rows, cols, mask, x = weight_tile(x_ptr, I, O, SIDE)
    if BLOCKWISE:
        amax = tl.max(tl.max(tl.abs(x), 1), 0)
        if HAS_AMAX:
            amax = tl.load(amax_ptr + expert * tl.num_programs(1) + tl.program_id(1))
        inverse = inverse_scale(amax, LARGEST)
        tl.store(p_scale_ptr + expert * tl.num_programs(1) + i * num_o + o, tl.div_rn(1.0, inverse))
        num_i = tl.cdiv(I, SIDE)
        tl.store(t_scale_ptr + expert * tl.num_programs(1) + o * num_i + i, tl.div_rn(1.0, inverse))
    else:
        inverse = inverse_scale(tl.load(amax_ptr + expert), LARGEST)
        if tl.program_id(1) == 0:
            tl.store(p_scale_ptr + expert, tl.div_rn(1.0, inverse))
    q = stored(x, inverse, LARGEST, p_ptr.dtype.element_ty)
    tl.store(p_ptr + base + rows.to(tl.int64)[:, None] * O + cols[None, :], q, mask)
    out = t_ptr + base + cols.to(tl.int64)[:, None] * I + rows[None, :]
    tl.store(out, tl.trans(q), (cols < O)[:, None] & (rows < I)[None, :])


def quantize_weights(weight_EIO: Tensor, dtype: torch.dtype, *, blockwise: bool, amax: Tensor | None = None) -> Pair:
    """Weights in FP8 in both layouts, with one scale an expert, or one a block of 128 x 128.

    ``amax`` [E] or [E, I / 128, O / 128] instead of their own largest magnitudes.
    """
    weight_EIO = weight_EIO.contiguous()
    num, width_i, width_o = weight_EIO.shape
    device = weight_EIO.device
    as_is_EIO = torch.empty(weight_EIO.shape, dtype=dtype, device=device)
    turned_EOI = torch.empty((num, width_o, width_i), dtype=dtype, device=device)
    blocks = (triton.cdiv(width_i, TILE), triton.cdiv(width_o, TILE)) if blockwise else ()
    as_is_scale = torch.empty((num, *blocks), device=device)
    turned_scale = torch.empty((num, *blocks[::-1]), device=device) if blockwise else as_is_scale
    if amax is None and not blockwise:
        amax = weight_amax(weight_EIO, blockwise=False)
    _quantize_weights[num, triton.cdiv(width_i, TILE) * triton.cdiv(width_o, TILE)](
        weight_EIO, weight_EIO if amax is None else amax.contiguous(), as_is_EIO, turned_EOI, as_is_scale,
        turned_scale, width_i, width_o, blockwise, amax is not None, torch.finfo(dtype).max, TILE,
    )  # fmt: skip
    return Pair((as_is_EIO, as_is_scale, None), (turned_EOI, turned_scale, None))


def weight_amax(weight_EIO: Tensor, *, blockwise: bool) -> Tensor:
    """Largest magnitudes of what shares a scale, fp32: [E], or [E, I / 128, O / 128] of blocks."""
    weight_EIO = weight_EIO.contiguous()
    num, width_i, width_o = weight_EIO.shape
    if blockwise:
        amax_EIO = torch.empty((num, triton.cdiv(width_i, TILE), triton.cdiv(width_o, TILE)), device=weight_EIO.device)
        _tile_amax[num, amax_EIO[0].numel()](weight_EIO, amax_EIO, width_i, width_o, TILE)
        return amax_EIO
    each = width_i * width_o
    parts_EN = torch.empty((num, triton.cdiv(each, AMAX_BLOCK)), device=weight_EIO.device)
    amax_of_parts[parts_EN.shape[::-1]](weight_EIO, parts_EN, each, AMAX_BLOCK)
    # Rounding keeps the order of magnitudes: the largest is rounded instead of all.
    amax_E: Tensor = parts_EN.amax(1).to(torch.bfloat16).to(torch.float32)
    return amax_E
