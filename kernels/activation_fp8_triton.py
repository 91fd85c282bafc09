"""Activations of expert MLPs that leave their output, and the gradient of their input, in FP8 for the next GEMMs.

With one scale a tensor a first pass finds the largest magnitude; it computes the same numbers and stores none of them.
Outputs are rounded to bf16 before they are quantized, as they are where nothing is fused.

Shapes: R rows, F width after the activation, G width before it: 2F (gate, then up) for gated kinds, else F; P padded.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeplan.kernels.activation_fp8_sums_triton import (
    activated,
    backward_sums,
    bf16,
    forward_amax,
    gate_and_up,
    probs,
    slopes,
    width_of,
)
from moeplan.kernels.activation_triton import _CODES, _GATED
from moeplan.kernels.fp8_tile_triton import (
    PARTS,
    rows_of_tile,
    scale_of_all,
    store_blocks,
    store_part,
    store_turned,
    tile_of_program,
)
from moeplan.kernels.padded_rows import TILE, PaddedRows
from moeplan.kernels.quantize_triton import empty_pair
from moeplan.kernels.quantized_gemm import Pair


@dataclass(frozen=True)
class Tiling:
    """Columns of a tile of 128 rows, and its warps; 128 where each block of 128 has its scale.

    ``columns_first``: programs that follow one another take the columns of the same rows, not rows of the same columns.
    """

    cols: int
    num_warps: int
    columns_first: bool = True


# Of 9 the fastest on one H200: with the first pass 131,072 rows of 768 in 0.27 and 0.47 ms.
FORWARD = Tiling(64, 4)
BACKWARD = Tiling(32, 4)


@triton.jit
def _forward_rows(
    x_ptr, probs_ptr, source, is_row, cols, F, CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr
):  # fmt: skip
    """The activation of some rows, rounded to bf16."""
    place = x_ptr + source[:, None] * F * (2 if GATED else 1) + cols[None, :]
    gate, up = gate_and_up(place, F, is_row[:, None] & (cols < F)[None, :], GATED)
    return bf16(activated(gate, up, CODE, GATED) * probs(probs_ptr + source, is_row, HAS_PROBS))


@triton.jit
def _forward_part(
    x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, ROWS: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """A part of a tile, scaled and written as it is. Nothing is cut, for the scale covers all there is."""
    rows, source, is_row = rows_of_tile(tile, count, row_ptr, ROWS, PARTS, part)
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
    if not BLOCKWISE:
        inverse = scale_of_all(amax_ptr, p_scale_ptr, tile, first_col, LARGEST)
    if count > 0:
        cols = first_col + tl.arange(0, COLS)
        if BLOCKWISE:
            _rows, source, is_row = rows_of_tile(tile, count, row_ptr, ROWS, 1, 0)
            y = _forward_rows(x_ptr, probs_ptr, source, is_row, cols, F, CODE, GATED, HAS_PROBS)
            store_blocks(y, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, tile, first_col, F, F, P, LARGEST, ROWS, COLS)
        else:
            parts = ()
            for part in tl.static_range(PARTS):
                y = _forward_part(
                    x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F, CODE, GATED, HAS_PROBS, ROWS, part
                )
                parts += (y,)  # type: ignore[assignment]  # Triton's tuples grow
            store_turned(parts, t_ptr, tile, cols, F, P, ROWS, COMPILED)


@triton.jit
def _backward_rows(
    grad_ptr, x_ptr, probs_ptr, source, is_row, cols, F,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up of some rows, rounded to bf16."""
    mask = is_row[:, None] & (cols < F)[None, :]
    gate, up = gate_and_up(x_ptr + source[:, None] * F * (2 if GATED else 1) + cols[None, :], F, mask, GATED)
    grad = tl.load(grad_ptr + source[:, None] * F + cols[None, :], mask, 0).to(tl.float32)
    grad_gate, grad_up = slopes(grad, gate, up, probs(probs_ptr + source, is_row, HAS_PROBS), CODE, GATED)
    return bf16(grad_gate), bf16(grad_up)


@triton.jit
def _backward_part(
    grad_ptr, x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, ROWS: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """A part of a tile of both gradients, scaled and written as it is."""
    rows, source, is_row = rows_of_tile(tile, count, row_ptr, ROWS, PARTS, part)
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
    if not BLOCKWISE:
        inverse = scale_of_all(amax_ptr, p_scale_ptr, tile, first_col, LARGEST)
    if count > 0:
        cols, G = first_col + tl.arange(0, COLS), F * (2 if GATED else 1)
        if BLOCKWISE:
            _rows, source, is_row = rows_of_tile(tile, count, row_ptr, ROWS, 1, 0)
            gate, up = _backward_rows(grad_ptr, x_ptr, probs_ptr, source, is_row, cols, F, CODE, GATED, HAS_PROBS)
            store_blocks(gate, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, tile, first_col, F, G, P, LARGEST, ROWS, COLS)
            if GATED:
                store_blocks(
                    up, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, tile, first_col + F, G, G, P, LARGEST, ROWS, COLS
                )
        else:
            gates, ups = (), ()
            for part in tl.static_range(PARTS):
                gate, up = _backward_part(
                    grad_ptr, x_ptr, probs_ptr, row_ptr, p_ptr, inverse, tile, count, cols, F, CODE, GATED, HAS_PROBS,
                    ROWS, part,
                )  # fmt: skip
                gates += (gate,)  # type: ignore[assignment]  # as above
                ups += (up,)  # type: ignore[assignment]
            store_turned(gates, t_ptr, tile, cols, F, P, ROWS, COMPILED)
            if GATED:
                store_turned(ups, t_ptr, tile, cols + F, G, P, ROWS, COMPILED)


def activate(
    x_RG: Tensor, kind: str, probs_R: Tensor | None, rows: PaddedRows, dtype: torch.dtype, *, blockwise: bool,
    tiling: Tiling = FORWARD,
) -> Pair:  # fmt: skip
    """act(x), times ``probs_R`` where given, in FP8 and both layouts; ``tiling`` changes no number."""
    pair = empty_pair(width_of(x_RG, kind), rows, dtype, x_RG.device, blockwise=blockwise)
    if rows.num_rows:
        amax_1 = x_RG if blockwise else forward_amax(x_RG, kind, probs_R).amax()
        _launch(_forward, (x_RG,), kind, probs_R, amax_1, rows, pair, tiling, blockwise=blockwise)
    return pair


def activate_backward(
    grad_RF: Tensor, x_RG: Tensor, kind: str, probs_R: Tensor | None, rows: PaddedRows, dtype: torch.dtype,
    *, blockwise: bool, tiling: Tiling = BACKWARD,
) -> tuple[Pair, Tensor | None]:  # fmt: skip
    """Gradient of x in FP8 and both layouts, and that of the probabilities."""
    pair = empty_pair(x_RG.shape[1], rows, dtype, x_RG.device, blockwise=blockwise)
    if not rows.num_rows:
        return pair, None if probs_R is None else torch.empty_like(probs_R)
    amax_1, grad_probs_R = x_RG, None
    if not blockwise or probs_R is not None:
        amax_N, grad_probs_R = backward_sums(grad_RF, x_RG, kind, probs_R)
        amax_1 = x_RG if blockwise else amax_N.amax()
    _launch(_backward, (grad_RF, x_RG), kind, probs_R, amax_1, rows, pair, tiling, blockwise=blockwise)
    return pair, grad_probs_R


def _launch(
    kernel: Any, inputs: tuple[Tensor, ...], kind: str, probs_R: Tensor | None, amax_1: Tensor, rows: PaddedRows,
    pair: Pair, tiling: Tiling, *, blockwise: bool,
) -> None:  # fmt: skip
    x_RG, (as_is, turned) = inputs[-1], pair
    width, cols = width_of(x_RG, kind), TILE if blockwise else tiling.cols
    kernel[rows.num_tiles * triton.cdiv(width, cols),](
        *inputs, x_RG if probs_R is None else probs_R, amax_1, rows.row_of_tile, rows.count_of_tile, as_is[0],
        turned[0], as_is[1], turned[1], width, rows.num_padded, _CODES[kind], kind in _GATED, probs_R is not None,
        blockwise, torch.finfo(as_is[0].dtype).max, TILE, cols, tiling.columns_first, x_RG.is_cuda,
        num_warps=tiling.num_warps,
    )  # fmt: skip
