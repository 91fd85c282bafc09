"""A tile of rows in FP8 with one scale a tensor, as it is and turned, by way of words of four rows.

Turned as bytes a tile goes through shared memory a byte at a time: 1.4 TB/s of an H200's 4.3, where words take half the
time. A word is made of numbers in fp32, by PTX of its own: of bytes cut from what was stored, ptxas 12.8 loses three.

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
def tile_of_program(C, COLS: tl.constexpr, COLUMNS_FIRST: tl.constexpr):
    """A program's tile of rows, and its first column."""
    num_cols = tl.cdiv(C, COLS)
    if COLUMNS_FIRST:
        return tl.program_id(0) // num_cols, tl.program_id(0) % num_cols * COLS
    num_tiles = tl.num_programs(0) // num_cols
    return tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles * COLS


@triton.jit
def part_of_tile(tile, count, row_ptr, ROWS: tl.constexpr, part: tl.constexpr):
    """Every fourth row of a tile from ``part`` on: where it is written, where it is read, and whether it is there."""
    rows = tl.arange(0, ROWS // PARTS) * PARTS + part
    return tile * ROWS + rows, (tl.load(row_ptr + tile) + rows).to(tl.int64), rows < count


@triton.jit
def store_part(x, p_ptr, rows, cols, end_col, C):
    """Write a part of a tile, scaled so that none exceeds what the format holds, to [P, C]."""
    q = x.to(p_ptr.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(p_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :], q, (cols < end_col)[None, :])


@triton.jit
def store_turned(
    x0, x1, x2, x3, t_ptr, tile, cols, end_col, P, ROWS: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Write all four parts of a tile to [C, P]. Not ``COMPILED``: the interpreter, which knows no PTX."""
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
