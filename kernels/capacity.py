"""At most so many tokens an expert: which copies are dropped (report section 7).

Shapes: T tokens, K experts per token, R = T * K copies, E experts.
"""

import math
from typing import Literal

import torch
from torch import Tensor

DropPolicy = Literal["probs", "position"]


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Copies of ``num_tokens`` tokens that one expert takes: ceil(T * K / E * factor) (report section 7)."""
    return math.ceil(num_tokens * top_k / num_experts * factor)


def within_capacity(
    expert_index_TK: Tensor, probs_TK: Tensor, num_experts: int, capacity: int, policy: DropPolicy
) -> Tensor:
    """Indices [T, K] with ``num_experts`` in place of copies beyond an expert's ``capacity``. No host wait.

    Kept are the ``probs`` that are largest, or those that come first by ``position`` (of tokens, then choices), which
    also decides between equal probabilities.
    """
    index_R = expert_index_TK.flatten()
    if policy == "probs":
        by_prob_R = torch.sort(probs_TK.detach().flatten(), descending=True, stable=True).indices
        by_expert_R = torch.sort(index_R[by_prob_R], stable=True).indices
        order_R = by_prob_R[by_expert_R]
    else:
        order_R = torch.sort(index_R, stable=True).indices
    sorted_R = index_R[order_R]
    place_R = torch.arange(len(order_R), device=order_R.device) - torch.searchsorted(sorted_R, sorted_R)
    kept_R = torch.empty_like(index_R)
    kept_R[order_R] = torch.where(place_R < capacity, sorted_R, num_experts)
    return kept_R.view_as(expert_index_TK)
