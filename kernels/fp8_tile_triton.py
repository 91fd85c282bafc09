"""A tile of rows in FP8, as it is and turned.

With one scale a tensor a tile is turned by way of words of four rows: as bytes it would go through shared memory a byte
at a time, at 1.4 TB/s of an H200's 4.3, where words come to 2.5. A word is made of numbers in fp32, by PTX of its own:
of bytes cut from what was stored, ptxas 12.8 loses three. With a scale a block both layouts have other numbers.

Shapes: P padded rows in tiles of ROWS, C columns.
"""
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

# Rows of a tile that a program takes at once: every fourth, so that a word's four are in one thread.
PARTS = tl.constexpr(4)

_E4M3 = tl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "mov.b32 $0, {low, high}; }"
)
_E5M2 = tl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; "
    "mov.b32 $0, {low, high}; }"
)


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
def scale_of_all(amax_ptr, scale_ptr, tile, first_col, LARGEST: tl.constexpr):
    """The inverse of the one scale of a tensor, which the first program writes, even where no row came."""
    inverse = inverse_scale(tl.load(amax_ptr), LARGEST)
    if (tile == 0) & (first_col == 0):
        tl.store(scale_ptr, tl.div_rn(1.0, inverse))
    return inverse


@triton.jit
def tile_of_program(C, COLS: tl.constexpr, COLUMNS_FIRST: tl.constexpr):
    """A program's tile of rows, and its first column."""
    num_cols = tl.cdiv(C, COLS)
    if COLUMNS_FIRST:
        return tl.program_id(0) // num_cols, tl.program_id(0) % num_cols * COLS
    num_tiles = tl.num_programs(0) // num_cols
    return tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles * COLS


@triton.jit
def rows_of_tile(tile, count, row_ptr, ROWS: tl.constexpr, STEP: tl.constexpr, part: tl.constexpr):
    """Every ``STEP``-th row of a tile from ``part`` on: where it is written, where it is read, whether it is there."""
    rows = tl.arange(0, ROWS // STEP) * STEP + part
    return tile * ROWS + rows, (tl.load(row_ptr + tile) + rows).to(tl.int64), rows < count


@triton.jit
def store_part(x, p_ptr, rows, cols, end_col, C):
    """Write a part of a tile, scaled so that none exceeds what the format holds, to [P, C]."""
    q = x.to(p_ptr.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(p_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :], q, (cols < end_col)[None, :])


@triton.jit
def store_turned(parts, t_ptr, tile, cols, end_col, P, ROWS: tl.constexpr, COMPILED: tl.constexpr):
    """Write all parts of a tile to [C, P]. Not ``COMPILED``: the interpreter, which knows no PTX."""
    x0, x1, x2, x3 = parts
    DTYPE: tl.constexpr = t_ptr.dtype.element_ty
    if COMPILED:
        words = tl.inline_asm_elementwise(
            _E4M3 if tl.float8e4nv == DTYPE else _E5M2, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        words = _code(x0, DTYPE) | _code(x1, DTYPE) << 8 | _code(x2, DTYPE) << 16 | _code(x3, DTYPE) << 24
    word_ptr = t_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    places = tile * (ROWS // PARTS) + tl.arange(0, ROWS // PARTS)
    tl.store(
        word_ptr + cols.to(tl.int64)[:, None] * (P // PARTS) + places[None, :],
        tl.trans(words),
        (cols < end_col)[:, None],
    )


@triton.jit
def _code(x, DTYPE: tl.constexpr):
    return x.to(DTYPE, fp_downcast_rounding="rtne").to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def store_blocks(
    x, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, tile, first_col, end_col, C, P,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write a tile [ROWS, COLS] of x in fp32 to [P, C] and to [C, P], with a scale for each row and each column of it.

    Nothing is written from ``end_col`` on.
    """
    rows = tile * ROWS + tl.arange(0, ROWS)
    cols = first_col + tl.arange(0, COLS)
    is_here = cols < end_col
    row_inverse = inverse_scale(tl.max(tl.abs(x), 1), LARGEST)
    col_inverse = inverse_scale(tl.max(tl.abs(x), 0), LARGEST)
    tl.store(p_scale_ptr + (first_col // COLS) * P + rows, tl.div_rn(1.0, row_inverse))
    tl.store(t_scale_ptr + tile * C + cols, tl.div_rn(1.0, col_inverse), is_here)
    by_row = stored(x, row_inverse[:, None], LARGEST, p_ptr.dtype.element_ty)
    by_col = stored(x, col_inverse[None, :], LARGEST, p_ptr.dtype.element_ty)
    tl.store(p_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :], by_row, is_here[None, :])
    tl.store(t_ptr + cols.to(tl.int64)[:, None] * P + rows[None, :], tl.trans(by_col), is_here[:, None])
