"""Permutation by plain indexing, any device and dtype; gradients are those of autograd.

Shapes: T tokens, K experts per token, R = T * K rows sorted by expert, H width.
"""

import torch
from torch import Tensor

from moeplan.kernels.row_map import RowMap


def permute(x_TH: Tensor, rows: RowMap) -> Tensor:
    """rows_RH; see :func:`moeplan.kernels.permute.permute`."""
    return _gathered(x_TH, rows.token_of_row_R)


def unpermute(rows_RH: Tensor, rows: RowMap, probs_TK: Tensor | None = None) -> Tensor:
    """y_TH; see :func:`moeplan.kernels.permute.unpermute`."""
    copies_TKH = _gathered(rows_RH, rows.row_of_slot_TK)
    if probs_TK is not None:
        copies_TKH = copies_TKH * probs_TK[..., None]
    return copies_TKH.sum(1).to(rows_RH.dtype)


def permute_probs(probs_TK: Tensor, rows: RowMap) -> Tensor:
    """probs_R; see :func:`moeplan.kernels.permute.permute_probs`."""
    return _gathered(probs_TK.flatten(), rows.slot_of_row_R)


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x, zero for index -1."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[index.long()]
