"""Balancing losses of a micro-batch or of a pack (dynamic cp), in which each token of the step counts the same.

Shapes: L tokens of this rank, K experts per token, E experts, S sets of tokens that are balanced apart.
"""
# ruff: noqa: N815 - shape suffixes

from dataclasses import dataclass

import torch
from torch import Tensor

from moeplan.executor.collectives import all_reduced
from moeplan.executor.mesh import Group
from moeplan.executor.pack_layout import PackLayout
from moeplan.kernels.router import Routing, attach_gradient, balance_gradient, count_tokens
from moeplan.model_spec import Moe


@dataclass(frozen=True, eq=False)
class TokenSets:
    """The tokens that ``group`` holds, in the sets that are balanced apart.

    ``set_L``: that of each token of this rank, S for padding; None where there is one set and no padding.
    ``num_tokens``: of each set, over all of the group.
    """

    set_L: Tensor | None
    num_tokens: tuple[int, ...]
    group: Group


def pack_sets(layout: PackLayout, *, per_document: bool) -> TokenSets:
    """A pack is one set, or each of its documents."""
    if per_document:
        return TokenSets(layout.document_L, layout.lengths, layout.tp_cp_group)
    set_L = (~layout.is_real_L).to(torch.int64) if layout.has_padding else None
    return TokenSets(set_L, (sum(layout.lengths),), layout.tp_cp_group)


def count_real(index_LK: Tensor, num_experts: int, layout: PackLayout) -> Tensor:
    """Copies [E] of this rank's tokens by expert, padding left out."""
    if layout.has_padding:
        index_LK = index_LK.masked_fill(~layout.is_real_L[:, None], num_experts)
    return count_tokens(index_LK, num_experts + 1)[0, :num_experts]


def attach_balance(probs_LK: Tensor, routing: Routing, moe: Moe, sets: TokenSets, num_step_tokens: int) -> Tensor:
    """``probs_LK``; its backward adds this rank's part of the balancing loss of the sets (``balance_gradient``).

    Sets count by their part of the step's tokens, and fractions are over all ranks of the group. Over equal sequences
    the loss is the mean over sequences.
    """
    num_experts, num_sets, index_LK = moe.num_experts, len(sets.num_tokens), routing.expert_index_TK
    if sets.set_L is None:
        assert routing.totals is not None
        share_SE, num_copies_SE = routing.totals.share_E[None], routing.totals.num_copies_E[None]
    else:
        assert routing.share_TE is not None
        index_LK = index_LK + sets.set_L[:, None] * num_experts
        num_copies_SE = count_tokens(index_LK, (num_sets + 1) * num_experts).view(num_sets + 1, num_experts)
        num_copies_SE = num_copies_SE[:num_sets].contiguous()
        share_SE = routing.share_TE.new_zeros(num_sets + 1, num_experts).index_add(0, sets.set_L, routing.share_TE)
        share_SE = share_SE[:num_sets]
    num_copies_SE = all_reduced(num_copies_SE, sets.group).to(share_SE.dtype)
    # An idle rank's only document has no tokens.
    copies = [max(1, num) * moe.top_k for num in sets.num_tokens]
    set_copies = copies[0] if num_sets == 1 else num_copies_SE.new_tensor(copies)[:, None]
    grad_SE = balance_gradient(num_copies_SE, set_copies, num_step_tokens, moe.router.aux_loss_coeff)
    return attach_gradient(probs_LK, share_SE, grad_SE)
