"""Quantizing to FP8 in one pass over the input: both layouts of every operand, rows padded to whole tiles.

Hopper's FP8 GEMM wants each operand along the summed dimension, so what is summed over width forward is summed over
rows in the weight gradient: each tile is written as it is and transposed while it is in registers.

Shapes: R rows, C columns, P padded rows, E experts, I and O sides of a weight, B blocks of 128.
"""
# ruff: noqa: ANN001, ANN201, ANN202, E741, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeplan.kernels.fp8_tile_triton import part_of_tile, store_part, store_turned, tile_of_program
from moeplan.kernels.padded_rows import TILE, PaddedRows
from moeplan.kernels.quantized_gemm import Pair
from moeplan.kernels.row_map import RowMap

_COLS = 64  # columns of a tile with one scale for all
_AMAX_BLOCK = 16384  # elements one program reads: 8 thousand programs for 2 GiB of bf16


@triton.jit
def inverse_scale(amax, LARGEST: tl.constexpr):
    """What a number is multiplied by before it is stored; 1 where all are (as good as) zero, as in the reference."""
    return tl.where(amax > 1e-30, tl.div_rn(LARGEST, tl.maximum(amax, 1e-30)), 1.0)


@triton.jit
def stored(x, inverse, LARGEST: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers times their inverse scale, cut to what the format holds. NaN stays NaN, or nobody would find it."""
    return cut(x * inverse, LARGEST).to(DTYPE, fp_downcast_rounding="rtne")


@triton.jit
def cut(x, LARGEST: tl.constexpr):
    """Numbers cut to what a format holds."""
    above = tl.maximum(x, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(above, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_places(row_ptr, count, tile, first_col, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows of the input that a tile holds, its columns, which rows it has, and which places of both."""
    rows, cols = tl.arange(0, ROWS), first_col + tl.arange(0, COLS)
    source = (tl.load(row_ptr + tile) + rows).to(tl.int64)
    is_row = rows < count
    return source, cols, is_row, is_row[:, None] & (cols < width)[None, :]


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
def store_pair(
    x, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, amax, tile, first_col, end_col, C, P,
    BLOCKWISE: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write a tile [ROWS, COLS] of x in fp32 to [P, C] and, transposed, to [C, P], each with its scales.

    Nothing is written from ``end_col`` on.
    """
    rows = tile * ROWS + tl.arange(0, ROWS)
    cols = first_col + tl.arange(0, COLS)
    is_here = cols < end_col
    DTYPE: tl.constexpr = p_ptr.dtype.element_ty
    if BLOCKWISE:
        row_inverse = inverse_scale(tl.max(tl.abs(x), 1), LARGEST)
        col_inverse = inverse_scale(tl.max(tl.abs(x), 0), LARGEST)
        tl.store(p_scale_ptr + (first_col // COLS) * P + rows, tl.div_rn(1.0, row_inverse))
        tl.store(t_scale_ptr + tile * C + cols, tl.div_rn(1.0, col_inverse), is_here)
        by_row = stored(x, row_inverse[:, None], LARGEST, DTYPE)
        by_col = stored(x, col_inverse[None, :], LARGEST, DTYPE)
    else:
        inverse = inverse_scale(amax, LARGEST)
        if (tile == 0) & (first_col == 0):
            tl.store(p_scale_ptr, tl.div_rn(1.0, inverse))
        by_row = stored(x, inverse, LARGEST, DTYPE)
        by_col = by_row
    tl.store(p_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :], by_row, is_here[None, :])
    tl.store(t_ptr + cols.to(tl.int64)[:, None] * P + rows[None, :], tl.trans(by_col), is_here[:, None])


@triton.jit
def _amax(
    x_ptr,
    part_ptr,
    N,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(1).to(tl.int64) * N + place, place < N, 0).to(tl.float32)
    tl.store(part_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.max(tl.abs(x), 0))


@triton.jit
def _tile_amax(x_ptr, amax_ptr, A, B, SIDE: tl.constexpr):
    _base, _a, _b, _rows, _cols, _mask, x = weight_tile(x_ptr, A, B, SIDE)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(amax_ptr + place, tl.max(tl.max(tl.abs(x), 1), 0))


@triton.jit
def _quantize_rows(
    x_ptr, slot_ptr, amax_ptr, row_ptr, count_ptr, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, C, P,
    TOP_K: tl.constexpr, BLOCKWISE: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    tile, first_col = tile_of_program(C, COLS, COLUMNS_FIRST)
    count = tl.load(count_ptr + tile)
    if count > 0:
        cols = first_col + tl.arange(0, COLS)
        if BLOCKWISE:
            rows = tl.arange(0, ROWS)
            source = (tl.load(row_ptr + tile) + rows).to(tl.int64)
            x = _rows_of(x_ptr, slot_ptr, source, rows < count, cols, C, TOP_K)
            store_pair(
                x, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, 0.0, tile, first_col, C, C, P, True, LARGEST, ROWS, COLS
            )
        else:
            inverse = inverse_scale(tl.load(amax_ptr), LARGEST)
            x0 = _part(x_ptr, slot_ptr, row_ptr, p_ptr, inverse, tile, count, cols, C, TOP_K, LARGEST, ROWS, 0)
            x1 = _part(x_ptr, slot_ptr, row_ptr, p_ptr, inverse, tile, count, cols, C, TOP_K, LARGEST, ROWS, 1)
            x2 = _part(x_ptr, slot_ptr, row_ptr, p_ptr, inverse, tile, count, cols, C, TOP_K, LARGEST, ROWS, 2)
            x3 = _part(x_ptr, slot_ptr, row_ptr, p_ptr, inverse, tile, count, cols, C, TOP_K, LARGEST, ROWS, 3)
            store_turned(x0, x1, x2, x3, t_ptr, tile, cols, C, P, ROWS, COMPILED)
            if (tile == 0) & (first_col == 0):
                tl.store(p_scale_ptr, tl.div_rn(1.0, inverse))


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
    rows, source, is_row = part_of_tile(tile, count, row_ptr, ROWS, part)
    x = cut(_rows_of(x_ptr, slot_ptr, source, is_row, cols, C, TOP_K) * inverse, LARGEST)
    store_part(x, p_ptr, rows, cols, C, C)
    return x


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


def amax(x: Tensor) -> Tensor:
    """The largest magnitude, fp32, on the device."""
    x = x.contiguous()
    num = x.numel()
    if not num:
        return torch.zeros((), device=x.device)
    parts = torch.empty(triton.cdiv(num, _AMAX_BLOCK), dtype=torch.float32, device=x.device)
    _amax[len(parts),](x, parts, num, _AMAX_BLOCK)
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
    # Where no row came, no tile writes the scale; multiplying by it must not bring a NaN.
    scale = torch.empty((), device=device) if rows.num_rows else torch.ones((), device=device)
    return Pair((as_is_PC, scale, None), (turned_CP, scale, None))


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
    parts_EN = torch.empty((num, triton.cdiv(each, _AMAX_BLOCK)), device=weight_EIO.device)
    _amax[parts_EN.shape[::-1]](weight_EIO, parts_EN, each, _AMAX_BLOCK)
    # Rounding keeps the order of magnitudes: the largest is rounded instead of all.
    amax_E: Tensor = parts_EN.amax(1).to(torch.bfloat16).to(torch.float32)
    return amax_E
