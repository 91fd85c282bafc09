"""Permutation by two kernels: rows copied by index, and a token's rows summed in fp32.

torch's embedding bag, with which the torch back end sums, moves 0.65 TB/s on an H200.

Shapes: T tokens, K experts per token, R = T * K rows sorted by expert, H width.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moeplan.kernels import permute_torch
from moeplan.kernels.row_map import RowMap
from moeplan.kernels.triton_launch import block_of, compute_dtype

permute_probs = permute_torch.permute_probs  # a few bytes a row: one gather each way


def permute(x_TH: Tensor, rows: RowMap) -> Tensor:
    """rows_RH; see :func:`moeplan.kernels.permute.permute`."""
    rows_RH: Tensor = _Permute.apply(x_TH, rows)
    return rows_RH


def unpermute(rows_RH: Tensor, rows: RowMap, probs_TK: Tensor | None = None) -> Tensor:
    """y_TH; see :func:`moeplan.kernels.permute.unpermute`. With probabilities this is the torch back end's."""
    if probs_TK is not None:
        return permute_torch.unpermute(rows_RH, rows, probs_TK)
    y_TH: Tensor = _Unpermute.apply(rows_RH, rows)
    return y_TH


@triton.jit
def _copy(
    x_ptr,
    slot_ptr,
    y_ptr,
    H,
    K,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    token = (slot // K).to(tl.int64)
    for start in range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < H
        tl.store(y_ptr + row * H + cols, tl.load(x_ptr + token * H + cols, mask & (slot >= 0), 0), mask)


@triton.jit
def _spread(
    x_ptr,
    row_ptr,
    y_ptr,
    H,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < H
        x = tl.load(x_ptr + token * H + cols, mask, 0)
        for k in tl.static_range(K):
            row = tl.load(row_ptr + token * K + k).to(tl.int64)
            tl.store(y_ptr + row * H + cols, x, mask)


@triton.jit
def _sum(
    rows_ptr,
    row_ptr,
    y_ptr,
    H,
    K: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < H
        total = tl.zeros((BLOCK,), DTYPE)
        for k in tl.static_range(K):
            row = tl.load(row_ptr + token * K + k).to(tl.int64)
            total += tl.load(rows_ptr + row * H + cols, mask & (row >= 0), 0).to(DTYPE)
        tl.store(y_ptr + token * H + cols, total.to(y_ptr.dtype.element_ty), mask)


def _copied(x_TH: Tensor, rows: RowMap) -> Tensor:
    """A copy of each token for each of its rows. Without gaps each token is read once, else once a row."""
    x_TH, slot_of_row_R = x_TH.contiguous(), rows.slot_of_row_R
    (num_tokens, top_k), num_rows, width = rows.row_of_slot_TK.shape, len(slot_of_row_R), x_TH.shape[1]
    rows_RH = x_TH.new_empty((num_rows, width))
    if num_rows and not rows.has_gaps:
        _spread[num_tokens,](x_TH, rows.row_of_slot_TK, rows_RH, width, top_k, block_of(width))
    elif num_rows:
        _copy[num_rows,](x_TH, slot_of_row_R, rows_RH, width, top_k, block_of(width))
    return rows_RH


def _summed(rows_RH: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    rows_RH = rows_RH.contiguous()
    num_tokens, top_k = row_of_slot_TK.shape
    y_TH = rows_RH.new_empty((num_tokens, rows_RH.shape[1]))
    if num_tokens:
        width = rows_RH.shape[1]
        _sum[num_tokens,](rows_RH, row_of_slot_TK, y_TH, width, top_k, compute_dtype(rows_RH), block_of(width))
    return y_TH


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, rows: RowMap) -> Tensor:
        ctx.save_for_backward(rows.row_of_slot_TK)
        return _copied(x_TH, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None]:
        (row_of_slot_TK,) = ctx.saved_tensors
        return _summed(grad_RH, row_of_slot_TK), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, rows: RowMap) -> Tensor:
        ctx.rows = rows  # indices of a map that both directions share: no gradient, no cycle
        return _summed(rows_RH, rows.row_of_slot_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None]:
        return _copied(grad_TH, ctx.rows), None
