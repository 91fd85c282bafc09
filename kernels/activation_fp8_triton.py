"""Activations of expert MLPs that leave their output, and the gradient of their input, in FP8 for the next GEMMs.

With one scale a tensor a first pass finds the largest magnitude; it computes the same numbers and stores none of them.
Outputs are rounded to bf16 before they are quantized, as they are where nothing is fused.

Shapes: R rows, F width after the activation, G width before it: 2F (gate, then up) for gated kinds, else F.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeplan.kernels.activation_triton import _CODES, _GATED, _act, _act_slope
from moeplan.kernels.padded_rows import TILE, PaddedRows
from moeplan.kernels.quantize_triton import empty_pair, store_pair, tile_places
from moeplan.kernels.quantized_gemm import Pair
from moeplan.kernels.triton_launch import block_of

_COLS = 128


@triton.jit
def _activated(gate, up, prob, CODE: tl.constexpr, GATED: tl.constexpr):
    y = _act(gate, CODE)
    if GATED:
        y *= up
    return (y * prob).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _forward_amax(
    x_ptr, probs_ptr, amax_ptr, F,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * F * (2 if GATED else 1)
    prob = 1.0
    if HAS_PROBS:
        prob = tl.load(probs_ptr + row).to(tl.float32)
    highest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, F, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < F
        gate = tl.load(x_row + cols, mask, 0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(x_row + F + cols, mask, 0).to(tl.float32)
        highest = tl.maximum(highest, tl.abs(_activated(gate, up, prob, CODE, GATED)))
    tl.store(amax_ptr + row, tl.max(highest, 0))


@triton.jit
def _forward(
    x_ptr, probs_ptr, amax_ptr, row_ptr, count_ptr, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, F, P,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, BLOCKWISE: tl.constexpr,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tile, first_col = tl.program_id(0), tl.program_id(1) * COLS
    count = tl.load(count_ptr + tile)
    if count > 0:
        source, cols, is_row, mask = tile_places(row_ptr, count, tile, first_col, F, ROWS, COLS)
        place = x_ptr + source[:, None] * F * (2 if GATED else 1) + cols[None, :]
        gate = tl.load(place, mask, 0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(place + F, mask, 0).to(tl.float32)
        prob = 1.0
        if HAS_PROBS:
            prob = tl.load(probs_ptr + source, is_row, 0).to(tl.float32)[:, None]
        y = _activated(gate, up, prob, CODE, GATED)
        amax = tl.load(amax_ptr)
        store_pair(
            y, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, amax, tile, first_col, F, F, P, BLOCKWISE, LARGEST, ROWS, COLS
        )


@triton.jit
def _slopes(grad, gate, up, prob, CODE: tl.constexpr, GATED: tl.constexpr):
    """Gradients of gate and up (both the gate's for kinds without one), rounded to bf16."""
    weighted = grad * prob
    grad_up = (weighted * _act(gate, CODE)).to(tl.bfloat16).to(tl.float32)
    if GATED:
        weighted *= up
    grad_gate = (weighted * _act_slope(gate, CODE)).to(tl.bfloat16).to(tl.float32)
    return grad_gate, grad_up


@triton.jit
def _backward_sums(
    grad_ptr, x_ptr, probs_ptr, grad_probs_ptr, amax_ptr, F,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = row * F * (2 if GATED else 1)
    prob = 1.0
    if HAS_PROBS:
        prob = tl.load(probs_ptr + row).to(tl.float32)
    grad_prob = tl.zeros((BLOCK,), tl.float32)
    highest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, F, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < F
        gate = tl.load(x_ptr + first + cols, mask, 0).to(tl.float32)
        grad = tl.load(grad_ptr + row * F + cols, mask, 0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(x_ptr + first + F + cols, mask, 0).to(tl.float32)
        grad_gate, grad_up = _slopes(grad, gate, up, prob, CODE, GATED)
        highest = tl.maximum(highest, tl.abs(grad_gate))
        act = _act(gate, CODE)
        if GATED:
            highest = tl.maximum(highest, tl.abs(grad_up))
            act *= up
        grad_prob += grad * act
    tl.store(amax_ptr + row, tl.max(highest, 0))
    if HAS_PROBS:
        tl.store(grad_probs_ptr + row, tl.sum(grad_prob, 0).to(grad_probs_ptr.dtype.element_ty))


@triton.jit
def _backward(
    grad_ptr, x_ptr, probs_ptr, amax_ptr, row_ptr, count_ptr, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, F, P,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, BLOCKWISE: tl.constexpr,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tile, first_col = tl.program_id(0), tl.program_id(1) * COLS
    count = tl.load(count_ptr + tile)
    if count > 0:
        source, cols, is_row, mask = tile_places(row_ptr, count, tile, first_col, F, ROWS, COLS)
        G = F * (2 if GATED else 1)
        place = x_ptr + source[:, None] * G + cols[None, :]
        gate = tl.load(place, mask, 0).to(tl.float32)
        grad = tl.load(grad_ptr + source[:, None] * F + cols[None, :], mask, 0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(place + F, mask, 0).to(tl.float32)
        prob = 1.0
        if HAS_PROBS:
            prob = tl.load(probs_ptr + source, is_row, 0).to(tl.float32)[:, None]
        grad_gate, grad_up = _slopes(grad, gate, up, prob, CODE, GATED)
        amax = tl.load(amax_ptr)
        store_pair(
            grad_gate, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, amax, tile, first_col, F, G, P, BLOCKWISE, LARGEST,
            ROWS, COLS,
        )  # fmt: skip
        if GATED:
            store_pair(
                grad_up, p_ptr, t_ptr, p_scale_ptr, t_scale_ptr, amax, tile, first_col + F, G, G, P, BLOCKWISE,
                LARGEST, ROWS, COLS,
            )  # fmt: skip


def activate(
    x_RG: Tensor, kind: str, probs_R: Tensor | None, rows: PaddedRows, dtype: torch.dtype, *, blockwise: bool
) -> Pair:
    """act(x), times ``probs_R`` where given, in FP8 and both layouts."""
    gated, width = kind in _GATED, _width(x_RG, kind)
    probs = x_RG if probs_R is None else probs_R
    pair = empty_pair(width, rows, dtype, x_RG.device, blockwise=blockwise)
    if not rows.num_rows:
        return pair
    amax_1 = x_RG
    if not blockwise:
        amax_R = torch.empty(rows.num_rows, device=x_RG.device)
        _forward_amax[rows.num_rows,](
            x_RG, probs, amax_R, width, _CODES[kind], gated, probs_R is not None, block_of(width)
        )
        amax_1 = amax_R.amax()
    _forward[rows.num_tiles, triton.cdiv(width, _COLS)](
        x_RG, probs, amax_1, rows.row_of_tile, rows.count_of_tile, pair.as_is[0], pair.turned[0], pair.as_is[1],
        pair.turned[1], width, rows.num_padded, _CODES[kind], gated, probs_R is not None, blockwise,
        torch.finfo(dtype).max, TILE, _COLS, num_warps=8,
    )  # fmt: skip
    return pair


def activate_backward(
    grad_RF: Tensor, x_RG: Tensor, kind: str, probs_R: Tensor | None, rows: PaddedRows, dtype: torch.dtype,
    *, blockwise: bool,
) -> tuple[Pair, Tensor | None]:  # fmt: skip
    """Gradient of x in FP8 and both layouts, and that of the probabilities."""
    gated, width = kind in _GATED, _width(x_RG, kind)
    probs = x_RG if probs_R is None else probs_R
    grad_probs_R = None if probs_R is None else torch.empty_like(probs_R)
    pair = empty_pair(x_RG.shape[1], rows, dtype, x_RG.device, blockwise=blockwise)
    if not rows.num_rows:
        return pair, grad_probs_R
    amax_1 = x_RG
    if not blockwise or grad_probs_R is not None:
        amax_R = torch.empty(rows.num_rows, device=x_RG.device)
        _backward_sums[rows.num_rows,](
            grad_RF, x_RG, probs, amax_R if grad_probs_R is None else grad_probs_R, amax_R, width, _CODES[kind],
            gated, probs_R is not None, block_of(width),
        )  # fmt: skip
        amax_1 = amax_R.amax()
    _backward[rows.num_tiles, triton.cdiv(width, _COLS)](
        grad_RF, x_RG, probs, amax_1, rows.row_of_tile, rows.count_of_tile, pair.as_is[0], pair.turned[0],
        pair.as_is[1], pair.turned[1], width, rows.num_padded, _CODES[kind], gated, probs_R is not None,
        blockwise, torch.finfo(dtype).max, TILE, _COLS, num_warps=8,
    )  # fmt: skip
    return pair, grad_probs_R


def _width(x_RG: Tensor, kind: str) -> int:
    return x_RG.shape[1] // (2 if kind in _GATED else 1)
