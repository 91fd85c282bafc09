"""Activations of expert MLPs that leave their output, and the gradient of their input, in FP8 for the next GEMMs.

With one scale a tensor a first pass finds the largest magnitude; it computes the same numbers and stores none of them.
Outputs are rounded to bf16 before they are quantized, as they are where nothing is fused.

Shapes: R rows, F width after the activation, G width before it: 2F (gate, then up) for gated kinds, else F; P padded.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeplan.kernels.activation_triton import _CODES, _GATED, _act, _act_slope
from moeplan.kernels.fp8_tile_triton import part_of_tile, store_part, store_turned, tile_of_program
from moeplan.kernels.padded_rows import TILE, PaddedRows
from moeplan.kernels.quantize_triton import empty_pair, inverse_scale, store_pair
from moeplan.kernels.quantized_gemm import Pair
from moeplan.kernels.triton_launch import MAX_BLOCK, block_of


@dataclass(frozen=True)
class Tiling:
    """Rows and columns that a program of the first pass holds at once, columns of the second's tiles, warps of both.

    ``sum_cols`` is cut to the width; tiles have 128 rows, and 128 columns where each block of 128 has its scale.
    ``columns_first``: programs that follow one another take the columns of the same rows, not rows of the same columns.
    """

    sum_rows: int = 1
    sum_cols: int = MAX_BLOCK
    sum_warps: int = 4
    cols: int = TILE
    num_warps: int = 8
    columns_first: bool = False


# Of 9 tiles and 10 blocks of the first pass the fastest on one H200: 131,072 rows of 768 in 0.27 and 0.47 ms.
FORWARD = Tiling(8, 128, 4, cols=64, num_warps=4, columns_first=True)
BACKWARD = Tiling(8, 128, 4, cols=32, num_warps=4, columns_first=True)


@triton.jit
def _bf16(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _gate_and_up(place, F, mask, GATED: tl.constexpr):
    """Both in fp32; of kinds without a gate the one input, twice."""
    gate = tl.load(place, mask, 0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(place + F, mask, 0).to(tl.float32)
    return gate, up


@triton.jit
def _probs(place, is_row, HAS_PROBS: tl.constexpr):
    """A probability a row, [ROWS, 1]."""
    if HAS_PROBS:
        return tl.load(place, is_row, 0).to(tl.float32)[:, None]
    return tl.full((is_row.shape[0], 1), 1.0, tl.float32)


@triton.jit
def _activated(gate, up, CODE: tl.constexpr, GATED: tl.constexpr):
    y = _act(gate, CODE)
    if GATED:
        y *= up
    return y


@triton.jit
def _slopes(grad, gate, up, prob, CODE: tl.constexpr, GATED: tl.constexpr):
    """Gradients of gate and up; for kinds without a gate the first is that of the input."""
    weighted = grad * prob
    grad_up = weighted * _act(gate, CODE)
    if GATED:
        weighted *= up
    return weighted * _act_slope(gate, CODE), grad_up


@triton.jit(do_not_specialize=["R"])
def _forward_amax(
    x_ptr, probs_ptr, amax_ptr, R, F,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    G = F * (2 if GATED else 1)
    first, rows = tl.program_id(0).to(tl.int64) * ROWS, tl.arange(0, ROWS)
    is_row = first + rows < R
    place = x_ptr + first * G + (rows * G)[:, None]
    highest = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, F, COLS):
        cols = (start + tl.arange(0, COLS))[None, :]
        gate, up = _gate_and_up(place + cols, F, is_row[:, None] & (cols < F), GATED)
        highest = tl.maximum(highest, tl.abs(_activated(gate, up, CODE, GATED)))
    # Neither a row's probability nor rounding changes which magnitude is the largest: once a row, not once an element.
    of_rows = tl.max(highest, 1)[:, None] * tl.abs(_probs(probs_ptr + first + rows, is_row, HAS_PROBS))
    tl.store(amax_ptr + tl.program_id(0), _bf16(tl.max(tl.max(of_rows, 1), 0)))


@triton.jit(do_not_specialize=["R"])
def _backward_sums(
    grad_ptr, x_ptr, probs_ptr, grad_probs_ptr, amax_ptr, R, F,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    G = F * (2 if GATED else 1)
    first, rows = tl.program_id(0).to(tl.int64) * ROWS, tl.arange(0, ROWS)
    is_row = first + rows < R
    place = x_ptr + first * G + (rows * G)[:, None]
    grad_place = grad_ptr + first * F + (rows * F)[:, None]
    prob = _probs(probs_ptr + first + rows, is_row, HAS_PROBS)
    grad_prob = tl.zeros((ROWS, COLS), tl.float32)
    highest = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, F, COLS):
        cols = (start + tl.arange(0, COLS))[None, :]
        mask = is_row[:, None] & (cols < F)
        gate, up = _gate_and_up(place + cols, F, mask, GATED)
        grad = tl.load(grad_place + cols, mask, 0).to(tl.float32)
        grad_gate, grad_up = _slopes(grad, gate, up, prob, CODE, GATED)
        highest = tl.maximum(highest, tl.abs(grad_gate))
        if GATED:
            highest = tl.maximum(highest, tl.abs(grad_up))
        grad_prob += grad * _activated(gate, up, CODE, GATED)
    tl.store(amax_ptr + tl.program_id(0), _bf16(tl.max(tl.max(highest, 1), 0)))
    if HAS_PROBS:
        sums = tl.sum(grad_prob, 1).to(grad_probs_ptr.dtype.element_ty)
        tl.store(grad_probs_ptr + first + rows, sums, is_row)


@triton.jit
def _forward_rows(
    x_ptr, probs_ptr, source, is_row, cols, F, CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr
):  # fmt: skip
    """The activation of some rows, rounded to bf16."""
    place = x_ptr + source[:, None] * F * (2 if GATED else 1) + cols[None, :]
    gate, up = _gate_and_up(place, F, is_row[:, None] & (cols < F)[None, :], GATED)
    return _bf16(_activated(gate, up, CODE, GATED) * _probs(probs_ptr + source, is_row, HAS_PROBS))


@triton.jit
def _forward_part(
    x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, ROWS: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """A part of a tile, scaled and written as it is. Nothing is cut, for the scale covers all there is."""
    rows, source, is_row = part_of_tile(tile, count, row_ptr, ROWS, part)
    y = _forward_rows(x_ptr, probs_ptr, source, is_row, cols, F, CODE, GATED, HAS_PROBS) * inverse
    store_part(y, p_ptr, rows, cols, F, F)
    return y


@triton.jit
def _forward(
    x_ptr, probs_ptr, amax_ptr, row_ptr, count_ptr, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, F, P,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, BLOCKWISE: tl.constexpr,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, COLUMNS_FIRST: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    tile, first_col = tile_of_program(F, COLS, COLUMNS_FIRST)
    count = tl.load(count_ptr + tile)
    if count > 0:
        cols = first_col + tl.arange(0, COLS)
        if BLOCKWISE:
            rows = tl.arange(0, ROWS)
            source = (tl.load(row_ptr + tile) + rows).to(tl.int64)
            y = _forward_rows(x_ptr, probs_ptr, source, rows < count, cols, F, CODE, GATED, HAS_PROBS)
            store_pair(
                y, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, 0.0, tile, first_col, F, F, P, True, LARGEST, ROWS, COLS
            )
        else:
            inverse = inverse_scale(tl.load(amax_ptr), LARGEST)
            y0 = _forward_part(
                x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F, CODE, GATED, HAS_PROBS, ROWS, 0
            )
            y1 = _forward_part(
                x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F, CODE, GATED, HAS_PROBS, ROWS, 1
            )
            y2 = _forward_part(
                x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F, CODE, GATED, HAS_PROBS, ROWS, 2
            )
            y3 = _forward_part(
                x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F, CODE, GATED, HAS_PROBS, ROWS, 3
            )
            store_turned(y0, y1, y2, y3, t_ptr, tile, cols, F, P, ROWS, COMPILED)
            if (tile == 0) & (first_col == 0):
                tl.store(p_scale_ptr, tl.div_rn(1.0, inverse))


@triton.jit
def _backward_rows(
    grad_ptr, x_ptr, probs_ptr, source, is_row, cols, F,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up of some rows, rounded to bf16."""
    mask = is_row[:, None] & (cols < F)[None, :]
    gate, up = _gate_and_up(x_ptr + source[:, None] * F * (2 if GATED else 1) + cols[None, :], F, mask, GATED)
    grad = tl.load(grad_ptr + source[:, None] * F + cols[None, :], mask, 0).to(tl.float32)
    grad_gate, grad_up = _slopes(grad, gate, up, _probs(probs_ptr + source, is_row, HAS_PROBS), CODE, GATED)
    return _bf16(grad_gate), _bf16(grad_up)


@triton.jit
def _backward_part(
    grad_ptr, x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, ROWS: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """A part of a tile of both gradients, scaled and written as it is."""
    rows, source, is_row = part_of_tile(tile, count, row_ptr, ROWS, part)
    grad_gate, grad_up = _backward_rows(grad_ptr, x_ptr, probs_ptr, source, is_row, cols, F, CODE, GATED, HAS_PROBS)
    grad_gate, grad_up, G = grad_gate * inverse, grad_up * inverse, F * (2 if GATED else 1)
    store_part(grad_gate, p_ptr, rows, cols, F, G)
    if GATED:
        store_part(grad_up, p_ptr, rows, cols + F, G, G)
    return grad_gate, grad_up


@triton.jit
def _backward(
    grad_ptr, x_ptr, probs_ptr, amax_ptr, row_ptr, count_ptr, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, F, P,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, BLOCKWISE: tl.constexpr,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, COLUMNS_FIRST: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    tile, first_col = tile_of_program(F, COLS, COLUMNS_FIRST)
    count = tl.load(count_ptr + tile)
    if count > 0:
        cols, G = first_col + tl.arange(0, COLS), F * (2 if GATED else 1)
        if BLOCKWISE:
            rows = tl.arange(0, ROWS)
            source = (tl.load(row_ptr + tile) + rows).to(tl.int64)
            gate, up = _backward_rows(grad_ptr, x_ptr, probs_ptr, source, rows < count, cols, F, CODE, GATED, HAS_PROBS)
            store_pair(
                gate, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, 0.0, tile, first_col, F, G, P, True, LARGEST, ROWS, COLS
            )
            if GATED:
                store_pair(
                    up, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, 0.0, tile, first_col + F, G, G, P, True, LARGEST,
                    ROWS, COLS,
                )  # fmt: skip
        else:
            inverse = inverse_scale(tl.load(amax_ptr), LARGEST)
            gate0, up0 = _backward_part(
                grad_ptr, x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F, CODE, GATED, HAS_PROBS,
                ROWS, 0,
            )  # fmt: skip
            gate1, up1 = _backward_part(
                grad_ptr, x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F, CODE, GATED, HAS_PROBS,
                ROWS, 1,
            )  # fmt: skip
            gate2, up2 = _backward_part(
                grad_ptr, x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F, CODE, GATED, HAS_PROBS,
                ROWS, 2,
            )  # fmt: skip
            gate3, up3 = _backward_part(
                grad_ptr, x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F, CODE, GATED, HAS_PROBS,
                ROWS, 3,
            )  # fmt: skip
            store_turned(gate0, gate1, gate2, gate3, t_ptr, tile, cols, F, P, ROWS, COMPILED)
            if GATED:
                store_turned(up0, up1, up2, up3, t_ptr, tile, cols + F, G, P, ROWS, COMPILED)
            if (tile == 0) & (first_col == 0):
                tl.store(p_scale_ptr, tl.div_rn(1.0, inverse))


def activate(
    x_RG: Tensor, kind: str, probs_R: Tensor | None, rows: PaddedRows, dtype: torch.dtype, *, blockwise: bool,
    tiling: Tiling = FORWARD,
) -> Pair:  # fmt: skip
    """act(x), times ``probs_R`` where given, in FP8 and both layouts; ``tiling`` changes no number."""
    gated, width = kind in _GATED, _width(x_RG, kind)
    probs = x_RG if probs_R is None else probs_R
    pair = empty_pair(width, rows, dtype, x_RG.device, blockwise=blockwise)
    if not rows.num_rows:
        return pair
    amax_1 = x_RG
    if not blockwise:
        block, amax_N = _sums(rows.num_rows, width, tiling, x_RG.device)
        _forward_amax[len(amax_N),](
            x_RG, probs, amax_N, rows.num_rows, width, _CODES[kind], gated, probs_R is not None, *block,
            num_warps=tiling.sum_warps,
        )  # fmt: skip
        amax_1 = amax_N.amax()
    cols = TILE if blockwise else tiling.cols
    _forward[rows.num_tiles * triton.cdiv(width, cols),](
        x_RG, probs, amax_1, rows.row_of_tile, rows.count_of_tile, pair.as_is[0], pair.turned[0], pair.as_is[1],
        pair.turned[1], width, rows.num_padded, _CODES[kind], gated, probs_R is not None, blockwise,
        torch.finfo(dtype).max, TILE, cols, tiling.columns_first, x_RG.is_cuda,
        num_warps=tiling.num_warps,
    )  # fmt: skip
    return pair


def activate_backward(
    grad_RF: Tensor, x_RG: Tensor, kind: str, probs_R: Tensor | None, rows: PaddedRows, dtype: torch.dtype,
    *, blockwise: bool, tiling: Tiling = BACKWARD,
) -> tuple[Pair, Tensor | None]:  # fmt: skip
    """Gradient of x in FP8 and both layouts, and that of the probabilities, whose sums follow ``tiling`` in order."""
    gated, width = kind in _GATED, _width(x_RG, kind)
    probs = x_RG if probs_R is None else probs_R
    grad_probs_R = None if probs_R is None else torch.empty_like(probs_R)
    pair = empty_pair(x_RG.shape[1], rows, dtype, x_RG.device, blockwise=blockwise)
    if not rows.num_rows:
        return pair, grad_probs_R
    amax_1 = x_RG
    if not blockwise or grad_probs_R is not None:
        block, amax_N = _sums(rows.num_rows, width, tiling, x_RG.device)
        _backward_sums[len(amax_N),](
            grad_RF, x_RG, probs, amax_N if grad_probs_R is None else grad_probs_R, amax_N, rows.num_rows, width,
            _CODES[kind], gated, probs_R is not None, *block, num_warps=tiling.sum_warps,
        )  # fmt: skip
        amax_1 = amax_N.amax()
    cols = TILE if blockwise else tiling.cols
    _backward[rows.num_tiles * triton.cdiv(width, cols),](
        grad_RF, x_RG, probs, amax_1, rows.row_of_tile, rows.count_of_tile, pair.as_is[0], pair.turned[0],
        pair.as_is[1], pair.turned[1], width, rows.num_padded, _CODES[kind], gated, probs_R is not None,
        blockwise, torch.finfo(dtype).max, TILE, cols, tiling.columns_first, x_RG.is_cuda,
        num_warps=tiling.num_warps,
    )  # fmt: skip
    return pair, grad_probs_R


def _sums(num_rows: int, width: int, tiling: Tiling, device: torch.device) -> tuple[tuple[int, int], Tensor]:
    """The block of a program of the first pass, and room for the magnitude that each finds."""
    num_programs = triton.cdiv(num_rows, tiling.sum_rows)
    return (tiling.sum_rows, min(tiling.sum_cols, block_of(width))), torch.empty(num_programs, device=device)


def _width(x_RG: Tensor, kind: str) -> int:
    return x_RG.shape[1] // (2 if kind in _GATED else 1)
