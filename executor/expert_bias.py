"""Biases of routed experts, added to rows that lie expert by expert (GPT-OSS).

Shapes: R rows, E experts of this rank, F width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def add_expert_bias(
    y_RF: Tensor, bias_EB: Tensor, offsets_E: Tensor, probs_R: Tensor | None = None, first: int = 0
) -> Tensor:
    """y_RF plus each row's expert's bias, times ``probs_R`` where given, in the columns from ``first`` on.

    ``offsets_E``: where the rows of each expert end. A bias narrower than y is one rank's part of it.
    """
    rows_R = torch.arange(y_RF.shape[0], device=y_RF.device, dtype=offsets_E.dtype)
    expert_R = torch.searchsorted(offsets_E, rows_R, right=True)
    bias_RB = F.embedding(expert_R.clamp(max=bias_EB.shape[0] - 1), bias_EB)
    if probs_R is not None:
        bias_RB = (bias_RB * probs_R[:, None]).to(y_RF.dtype)
    if bias_RB.shape[1] == y_RF.shape[1]:
        return y_RF + bias_RB
    return y_RF + F.pad(bias_RB, (first, y_RF.shape[1] - first - bias_RB.shape[1]))
