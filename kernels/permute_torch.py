"""Permutation whose forward and backward only gather: no atomics, no T x K x H intermediate, no wait for the host.

Sums over a token's K rows are embedding bags: one kernel, 5 to 15 times faster on a CPU than gather, view and sum
(T 2048, K 4, H 512, one thread).

Shapes: T tokens, K experts per token, R = T * K rows sorted by expert, H width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moeplan.kernels.row_map import RowMap


def permute(x_TH: Tensor, rows: RowMap) -> Tensor:
    """rows_RH; see :func:`moeplan.kernels.permute.permute`."""
    rows_RH: Tensor = _Permute.apply(x_TH, rows.token_of_row_R, rows.row_of_slot_TK)
    return rows_RH


def unpermute(rows_RH: Tensor, rows: RowMap, probs_TK: Tensor | None = None) -> Tensor:
    """y_TH; see :func:`moeplan.kernels.permute.unpermute`. Probabilities are rounded to the dtype of the rows."""
    if probs_TK is None:
        y_TH: Tensor = _Unpermute.apply(rows_RH, rows.token_of_row_R, rows.row_of_slot_TK)
    else:
        weights_TK = probs_TK.to(rows_RH.dtype)
        y_TH = _WeightedUnpermute.apply(rows_RH, weights_TK, rows.slot_of_row_R, rows.row_of_slot_TK)
    return y_TH


def permute_probs(probs_TK: Tensor, rows: RowMap) -> Tensor:
    """probs_R; see :func:`moeplan.kernels.permute.permute_probs`."""
    probs_R: Tensor = _PermuteProbs.apply(probs_TK, rows.slot_of_row_R, rows.row_of_slot_TK)
    return probs_R


def _sum_rows(rows_RH: Tensor, row_of_slot_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    return F.embedding_bag(row_of_slot_TK, rows_RH, mode="sum", per_sample_weights=weights_TK)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_slot_TK)
        return x_TH.index_select(0, token_of_row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None]:
        (row_of_slot_TK,) = ctx.saved_tensors
        return _sum_rows(grad_RH.contiguous(), row_of_slot_TK), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, token_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row_R)
        return _sum_rows(rows_RH.contiguous(), row_of_slot_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None]:
        (token_of_row_R,) = ctx.saved_tensors
        return grad_TH.index_select(0, token_of_row_R), None, None


class _WeightedUnpermute(torch.autograd.Function):
    """Keeps the rows as well: the gradient of a probability is their product with the gradient of the token."""

    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, weights_TK: Tensor, slot_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
        rows_RH = rows_RH.contiguous()
        ctx.save_for_backward(rows_RH, weights_TK, slot_of_row_R, row_of_slot_TK)
        return _sum_rows(rows_RH, row_of_slot_TK, weights_TK.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_RH, weights_TK, slot_of_row_R, row_of_slot_TK = ctx.saved_tensors
        grad_RH = grad_TH.index_select(0, slot_of_row_R // row_of_slot_TK.shape[1])
        grad_weights_R = torch.linalg.vecdot(grad_RH, rows_RH)
        grad_weights_TK = grad_weights_R.index_select(0, row_of_slot_TK.flatten()).view_as(row_of_slot_TK)
        weights_R = weights_TK.flatten().index_select(0, slot_of_row_R)
        return grad_RH.mul_(weights_R[:, None]), grad_weights_TK, None, None


class _PermuteProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs_TK: Tensor, slot_of_row_R: Tensor, row_of_slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_slot_TK)
        return probs_TK.flatten().index_select(0, slot_of_row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None, None]:
        (row_of_slot_TK,) = ctx.saved_tensors
        return grad_R.index_select(0, row_of_slot_TK.flatten()).view_as(row_of_slot_TK), None, None
