"""Quantizing rows to FP8 in one pass: both layouts, padded to whole tiles, and copied from tokens where they are that.

Hopper's FP8 GEMM wants each operand along the summed dimension, so what is summed over width forward is summed over
rows in the weight gradient: each tile is written as it is and turned.

Shapes: R rows, T tokens, C columns, P padded rows, B blocks of 128.
"""
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeplan.kernels.fp8_tile_triton import (
    PARTS,
    cut,
    rows_of_tile,
    scale_of_all,
    store_blocks,
    store_part,
    store_turned,
    tile_of_program,
)
from moeplan.kernels.padded_rows import TILE, PaddedRows
from moeplan.kernels.quantized_gemm import Pair
from moeplan.kernels.row_map import RowMap

_COLS = 64  # columns of a tile with one scale for all
AMAX_BLOCK = 16384  # elements one program reads: 8 thousand programs for 2 GiB of bf16


@triton.jit
def amax_of_parts(
    x_ptr,
    part_ptr,
    N,
    BLOCK: tl.constexpr,
):
    """The largest magnitude of each ``BLOCK`` of N elements, of as many tensors as programs of the second axis."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(1).to(tl.int64) * N + place, place < N, 0).to(tl.float32)
    tl.store(part_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.max(tl.abs(x), 0))


@triton.jit
def _quantize_rows(
    x_ptr, slot_ptr, amax_ptr, row_ptr, count_ptr, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, C, P,
    TOP_K: tl.constexpr, BLOCKWISE: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    tile, first_col = tile_of_program(C, COLS, COLUMNS_FIRST)
    count = tl.load(count_ptr + tile)
    if not BLOCKWISE:
        inverse = scale_of_all(amax_ptr, p_scale_ptr, tile, first_col, LARGEST)
    if count > 0:
        cols = first_col + tl.arange(0, COLS)
        if BLOCKWISE:
            _rows, source, is_row = rows_of_tile(tile, count, row_ptr, ROWS, 1, 0)
            x = _rows_of(x_ptr, slot_ptr, source, is_row, cols, C, TOP_K)
            store_blocks(x, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, tile, first_col, C, C, P, LARGEST, ROWS, COLS)
        else:
            parts = ()
            for part in tl.static_range(PARTS):
                x = _part(x_ptr, slot_ptr, row_ptr, p_ptr, inverse, tile, count, cols, C, TOP_K, LARGEST, ROWS, part)
                parts += (x,)  # type: ignore[assignment]  # Triton's tuples grow
            store_turned(parts, t_ptr, tile, cols, C, P, ROWS, COMPILED)


@triton.jit
def _rows_of(x_ptr, slot_ptr, source, is_row, cols, C, TOP_K: tl.constexpr):
    """Rows in fp32, zeros where there is none."""
    if TOP_K > 0:
        source = (tl.load(slot_ptr + source, is_row, 0) // TOP_K).to(tl.int64)
    return tl.load(x_ptr + source[:, None] * C + cols[None, :], is_row[:, None] & (cols < C)[None, :], 0).to(tl.float32)


@triton.jit
def _part(
    x_ptr, slot_ptr, row_ptr, p_ptr, inverse, tile, count, cols, C,
    TOP_K: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """A part of a tile, scaled and written as it is. The scale may be of another step: what exceeds it is cut."""
    rows, source, is_row = rows_of_tile(tile, count, row_ptr, ROWS, PARTS, part)
    x = cut(_rows_of(x_ptr, slot_ptr, source, is_row, cols, C, TOP_K) * inverse, LARGEST)
    store_part(x, p_ptr, rows, cols, C, C)
    return x


def amax(x: Tensor) -> Tensor:
    """The largest magnitude, fp32, on the device."""
    x = x.contiguous()
    num = x.numel()
    if not num:
        return torch.zeros((), device=x.device)
    parts = torch.empty(triton.cdiv(num, AMAX_BLOCK), dtype=torch.float32, device=x.device)
    amax_of_parts[len(parts),](x, parts, num, AMAX_BLOCK)
    return parts.amax()


def quantize_rows(
    x_RC: Tensor, rows: PaddedRows, dtype: torch.dtype, amax_1: Tensor | None, copied: RowMap | None = None
) -> Pair:
    """FP8 numbers of x in both layouts, with one scale from ``amax_1``, or one for each 128 along the sum.

    ``copied``: the map without gaps by which rows are copies of x, which then holds tokens [T, C].
    """
    x_RC = x_RC.contiguous()
    width, blockwise = x_RC.shape[1], amax_1 is None
    pair = empty_pair(width, rows, dtype, x_RC.device, blockwise=blockwise)
    top_k = 0 if copied is None else copied.row_of_slot_TK.shape[1]
    if rows.num_tiles:
        cols = TILE if blockwise else _COLS
        columns_first = copied is None  # of copies the columns of all tokens stay in L2 for the programs of other rows
        _quantize_rows[rows.num_tiles * triton.cdiv(width, cols),](
            x_RC, rows.row_of_tile if copied is None else copied.slot_of_row_R, x_RC if amax_1 is None else amax_1,
            rows.row_of_tile, rows.count_of_tile, pair.as_is[0], pair.turned[0], pair.as_is[1], pair.turned[1], width,
            rows.num_padded, top_k, blockwise, torch.finfo(dtype).max, TILE, cols, columns_first, x_RC.is_cuda,
            num_warps=4,
        )  # fmt: skip
    return pair


def empty_pair(width: int, rows: PaddedRows, dtype: torch.dtype, device: torch.device, *, blockwise: bool) -> Pair:
    """Room for an operand in both layouts, with its scales."""
    num_padded = rows.num_padded
    as_is_PC = torch.empty((num_padded, width), dtype=dtype, device=device)
    turned_CP = torch.empty((width, num_padded), dtype=dtype, device=device)
    if blockwise:
        blocks = triton.cdiv(width, TILE)
        as_is_scale = torch.empty((blocks, num_padded), device=device)
        return Pair(
            (as_is_PC, as_is_scale, None), (turned_CP, torch.empty((rows.num_tiles, width), device=device), None)
        )
    # Without tiles nobody writes the scale; multiplying by it must not bring a NaN.
    scale = torch.empty((), device=device) if rows.num_tiles else torch.ones((), device=device)
    return Pair((as_is_PC, scale, None), (turned_CP, scale, None))
