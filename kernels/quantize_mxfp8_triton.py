"""Quantizing to MXFP8 in one pass over the input, for Blackwell: both forms of an operand, scales where it reads them.

A tile of 128 x 128 numbers has one tile of 128 x 4 scales in each form (:mod:`moeplan.kernels.scale_tiles`): a program
writes 512 bytes of either in one piece. Numbers and scales are the reference's to the bit.

Shapes: R rows, C columns, P padded rows, E experts, A and B sides of a weight.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeplan.kernels.fp8_tile_triton import rows_of_tile, stored
from moeplan.kernels.padded_rows import TILE, PaddedRows
from moeplan.kernels.quantize_weights_triton import weight_tile
from moeplan.kernels.quantized_gemm import Pair
from moeplan.kernels.scale_tiles import BLOCKS


@triton.jit
def _scale_byte(amax):
    """E8M0: the exponent of the power of two that covers amax, plus 127; that of 1 where all are zero."""
    ratio = tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38)
    bits = ratio.to(tl.int32, bitcast=True)
    byte = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    return tl.where(amax > 0, byte, 127)


@triton.jit
def _inverse(byte):
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_scales(ptr, byte, is_here):
    """A tile [128, 4] of scales to its 512 bytes."""
    row, block = tl.arange(0, 128)[:, None], tl.arange(0, 4)[None, :]
    tl.store(ptr + row % 32 * 16 + row // 32 * 4 + block, tl.where(is_here, byte, 0).to(tl.uint8))


@triton.jit
def _both(
    x, first_row, first_col, end_row, end_col, as_is_ptr, as_is_stride, turned_ptr, turned_stride, as_is_scale_ptr,
    turned_scale_ptr, SIDE: tl.constexpr,
):  # fmt: skip
    """Write a tile of x in both forms from (first_row, first_col) on, but nothing from the ends on."""
    row_byte = _scale_byte(tl.max(tl.abs(tl.reshape(x, (SIDE, 4, SIDE // 4))), 2))
    col_byte = _scale_byte(tl.max(tl.abs(tl.reshape(x, (4, SIDE // 4, SIDE))), 1))
    by_row = tl.reshape(tl.reshape(x, (SIDE, 4, SIDE // 4)) * _inverse(row_byte)[:, :, None], (SIDE, SIDE))
    by_col = tl.reshape(tl.reshape(x, (4, SIDE // 4, SIDE)) * _inverse(col_byte)[:, None, :], (SIDE, SIDE))
    rows, cols = first_row + tl.arange(0, SIDE), first_col + tl.arange(0, SIDE)
    row_is_here, col_is_here = rows < end_row, cols < end_col
    DTYPE: tl.constexpr = as_is_ptr.dtype.element_ty
    as_is = as_is_ptr + rows.to(tl.int64)[:, None] * as_is_stride + cols[None, :]
    tl.store(as_is, stored(by_row, 1.0, 448.0, DTYPE), row_is_here[:, None] & col_is_here[None, :])
    turned = turned_ptr + cols.to(tl.int64)[:, None] * turned_stride + rows[None, :]
    tl.store(turned, tl.trans(stored(by_col, 1.0, 448.0, DTYPE)), col_is_here[:, None] & row_is_here[None, :])
    row_block = first_row + tl.arange(0, 4) * (SIDE // 4) < end_row
    col_block = first_col + tl.arange(0, 4) * (SIDE // 4) < end_col
    _store_scales(as_is_scale_ptr, row_byte, row_is_here[:, None] & col_block[None, :])
    _store_scales(turned_scale_ptr, tl.trans(col_byte), col_is_here[:, None] & row_block[None, :])


@triton.jit
def _quantize_rows(
    x_ptr, row_ptr, count_ptr, expert_ptr, end_ptr, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, C, P, SIDE: tl.constexpr
):
    tile, col = tl.program_id(0), tl.program_id(1)
    count = tl.load(count_ptr + tile)
    if count > 0:
        cols = col * SIDE + tl.arange(0, SIDE)
        _rows, source, is_row = rows_of_tile(tile, count, row_ptr, SIDE, 1, 0)
        mask = is_row[:, None] & (cols < C)[None, :]
        x = tl.load(x_ptr + source[:, None] * C + cols[None, :], mask, 0).to(tl.float32)
        expert, num_cols = tl.load(expert_ptr + tile), tl.num_programs(1)
        first = tl.load(end_ptr + expert - 1, expert > 0, 0) // SIDE
        num_tiles = tl.load(end_ptr + expert) // SIDE - first
        turned_tile = first * num_cols + col * num_tiles + tile - first
        _both(
            x, tile * SIDE, col * SIDE, P, C, p_ptr, C, t_ptr, P, p_scale_ptr + (tile * num_cols + col) * (4 * SIDE),
            t_scale_ptr + turned_tile * (4 * SIDE), SIDE,
        )  # fmt: skip


@triton.jit
def _quantize_weights(x_ptr, as_is_ptr, turned_ptr, as_is_scale_ptr, turned_scale_ptr, A, B, SIDE: tl.constexpr):
    base, a, b, _rows, _cols, _mask, x = weight_tile(x_ptr, A, B, SIDE)
    own = tl.program_id(0) * tl.num_programs(1)
    _both(
        x, a * SIDE, b * SIDE, A, B, as_is_ptr + base, B, turned_ptr + base, A,
        as_is_scale_ptr + (own + tl.program_id(1)) * (4 * SIDE),
        turned_scale_ptr + (own + b * tl.cdiv(A, SIDE) + a) * (4 * SIDE), SIDE,
    )  # fmt: skip


def quantize_rows(x_RC: Tensor, rows: PaddedRows) -> Pair:
    """Rows in both forms, scales of the second expert by expert; what no expert has is left as it was."""
    x_RC, width, num_padded = x_RC.contiguous(), x_RC.shape[1], rows.num_padded
    num_cols = triton.cdiv(width, TILE)
    as_is_PC = torch.empty((num_padded, width), dtype=torch.float8_e4m3fn, device=x_RC.device)
    turned_CP = torch.empty((width, num_padded), dtype=torch.float8_e4m3fn, device=x_RC.device)
    as_is_scale = torch.empty((num_padded, num_cols * BLOCKS), dtype=torch.uint8, device=x_RC.device)
    turned_scale = torch.empty((num_cols * TILE, rows.num_tiles * BLOCKS), dtype=torch.uint8, device=x_RC.device)
    if rows.num_tiles:
        _quantize_rows[rows.num_tiles, num_cols](
            x_RC, rows.row_of_tile, rows.count_of_tile, rows.expert_of_tile, rows.padded_end_E, as_is_PC, turned_CP,
            as_is_scale, turned_scale, width, num_padded, TILE, num_warps=8,
        )  # fmt: skip
    return _pair(as_is_PC, as_is_scale, turned_CP, turned_scale)


def quantize_weights(weight_EAB: Tensor) -> Pair:
    """Weights in both forms, the scales of each expert in a row."""
    weight_EAB = weight_EAB.contiguous()
    num, width_a, width_b = weight_EAB.shape
    num_tiles = triton.cdiv(width_a, TILE) * triton.cdiv(width_b, TILE)
    as_is_EAB = torch.empty(weight_EAB.shape, dtype=torch.float8_e4m3fn, device=weight_EAB.device)
    turned_EBA = torch.empty((num, width_b, width_a), dtype=torch.float8_e4m3fn, device=weight_EAB.device)
    scales = [torch.empty((num, num_tiles * BLOCKS * TILE), dtype=torch.uint8, device=turned_EBA.device) for _ in "ab"]
    _quantize_weights[num, num_tiles](
        weight_EAB, as_is_EAB, turned_EBA, *scales, width_a, width_b, TILE, num_warps=8
    )  # fmt: skip
    return _pair(as_is_EAB, scales[0], turned_EBA, scales[1])


def _pair(as_is: Tensor, as_is_scale: Tensor, turned: Tensor, turned_scale: Tensor) -> Pair:
    scales = (scale.view(torch.float8_e8m0fnu) for scale in (as_is_scale, turned_scale))
    return Pair((as_is, next(scales), None), (turned, next(scales), None))
