"""Balancing losses of a pack (dynamic cp), by token: how documents are packed does not change what each counts.

Shapes: L tokens of this rank, K experts per token, E experts, S sets of tokens that are balanced apart.
"""

import torch
from torch import Tensor

from moeplan.executor.collectives import all_reduce
from moeplan.executor.pack_layout import PackLayout
from moeplan.kernels.router import Routing, count_tokens
from moeplan.model_spec import Moe


def count_real(index_LK: Tensor, num_experts: int, layout: PackLayout) -> Tensor:
    """Copies [E] of this rank's tokens by expert, padding left out."""
    if layout.has_padding:
        index_LK = index_LK.masked_fill(~layout.is_real_L[:, None], num_experts)
    return count_tokens(index_LK, num_experts + 1)[0, :num_experts]


def pack_balance_loss(routing: Routing, moe: Moe, layout: PackLayout) -> Tensor:
    """This rank's part of coeff E sum_e f_e P_e of its pack, or of each document, by their part of the step's tokens.

    f is the routed fraction, P the mean share, both over all ranks of the pack (report section 7). Over equal sequences
    it is the mean over sequences that a static micro-batch has.
    """
    num_experts, per_document = moe.num_experts, moe.router.aux_loss == "seq_aux_loss"
    lengths = layout.lengths if per_document else (sum(layout.lengths),)
    num_sets = len(lengths)
    set_L = (
        layout.document_L if per_document else (~layout.is_real_L).to(torch.int64)
    )  # the set after the last: padding
    index_LK = routing.expert_index_TK + set_L[:, None] * num_experts
    num_copies_SE = count_tokens(index_LK, (num_sets + 1) * num_experts).view(num_sets + 1, num_experts)[:num_sets]
    num_copies_SE = all_reduce(num_copies_SE.contiguous(), layout.tp_cp_group)
    share_SE = routing.share_TE.new_zeros(num_sets + 1, num_experts).index_add(0, set_L, routing.share_TE)[:num_sets]
    tokens_S = share_SE.new_tensor(lengths).clamp(min=1)  # an idle rank's only document has none
    scale = moe.router.aux_loss_coeff * num_experts / (moe.top_k * layout.num_step_tokens)
    loss: Tensor = ((share_SE * num_copies_SE).sum(1) / tokens_S).sum() * scale
    return loss


def pack_z_loss(logits_LE: Tensor, coeff: float, layout: PackLayout) -> Tensor:
    """This rank's part of coeff times the mean of logsumexp(logits)**2 over the tokens of the step."""
    squares_L = torch.logsumexp(logits_LE, -1).square()
    return coeff / layout.num_step_tokens * (squares_L * layout.is_real_L).sum()
