"""Which experts a token goes to, with what weight, and the losses that balance them (report section 7).

Shapes: T tokens, E experts, K experts per token, H width, S sequences.
"""
# ruff: noqa: N815 - shape suffixes

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.kernels.main_grad import main_grad_of
from moeplan.kernels.weight_grad import add_weight_grad_
from moeplan.kernels.weight_grad_queue import now_or_later

# Keeps a token whose scores all underflow from dividing 0 by 0.
_TINY = 1e-20


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """How experts are chosen and weighted; the fields of ``ModelSpec.moe.router`` with top_k."""

    top_k: int
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    scaling_factor: float = 1.0
    normalize_top_k: bool = True
    group_score_experts: int | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """``probs_TK`` weigh the chosen experts ``expert_index_TK``; ``share_TE`` are scores that sum to 1 over all E."""

    probs_TK: Tensor
    expert_index_TK: Tensor
    share_TE: Tensor


def router_logits(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """logits_TE in fp32 at least of x and weight of one dtype; both are kept as they are for backward."""
    if x_TH.dtype in (torch.bfloat16, torch.float16):
        logits_TE: Tensor = _HalfLogits.apply(x_TH, weight_EH)
        return logits_TE
    return F.linear(x_TH, weight_EH)


def route(
    logits_TE: Tensor, options: RouterOptions, bias_E: Tensor | None = None, expert_index_TK: Tensor | None = None
) -> Routing:
    """Choose K experts a token by score plus ``bias_E`` and weigh them by score alone.

    Weights are divided by their sum over the chosen K (where K > 1 and ``normalize_top_k``), then multiplied by the
    scaling factor; a softmax normalised so equals a softmax over the chosen logits. Gradients flow through
    ``probs_TK`` and ``share_TE``. One kernel each way on CUDA, where groups allow it. Experts are taken from
    ``expert_index_TK`` where given.
    """
    if logits_TE.is_cuda and expert_index_TK is None:
        from moeplan.kernels import router_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

        if router_triton.is_supported(logits_TE.shape[1], options.num_groups):
            return Routing(*router_triton.route(logits_TE, bias_E, options, _TINY))
    return route_reference(logits_TE, options, bias_E, expert_index_TK)


def route_reference(
    logits_TE: Tensor, options: RouterOptions, bias_E: Tensor | None = None, expert_index_TK: Tensor | None = None
) -> Routing:
    """:func:`route` in plain autograd: any device, dtype and number of groups."""
    if options.score_function == "softmax":
        scores_TE = share_TE = torch.softmax(logits_TE, -1)
    else:
        scores_TE = torch.sigmoid(logits_TE)
        share_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + _TINY)
    if expert_index_TK is None:
        with torch.no_grad():
            expert_index_TK = choose_experts(scores_TE if bias_E is None else scores_TE + bias_E, options)
    probs_TK = scores_TE.gather(1, expert_index_TK)
    if options.normalize_top_k and options.top_k > 1:
        probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + _TINY)
    if options.scaling_factor != 1:
        probs_TK = probs_TK * options.scaling_factor
    return Routing(probs_TK, expert_index_TK, share_TE)


def choose_experts(scores_TE: Tensor, options: RouterOptions) -> Tensor:
    """Indices [T, K] of the top K, inside the ``top_groups`` groups whose best scores sum highest.

    Summed are ``group_score_experts`` of each group, K/top_groups unless given.
    """
    if options.num_groups > 1:
        scores_TGN = scores_TE.unflatten(1, (options.num_groups, -1))
        per_group = options.group_score_experts or max(1, options.top_k // options.top_groups)
        group_score_TG = scores_TGN.topk(per_group, -1).values.sum(-1)
        chosen = group_score_TG.topk(options.top_groups, -1, sorted=False).indices
        refused_TG = torch.ones_like(group_score_TG, dtype=torch.bool).scatter_(1, chosen, value=False)
        scores_TE = scores_TGN.masked_fill(refused_TG[..., None], -torch.inf).flatten(1)
    return scores_TE.topk(options.top_k, -1).indices


def count_tokens(expert_index_TK: Tensor, num_experts: int, num_sequences: int = 1) -> Tensor:
    """Copies routed to each expert [S, E] in fp32, for sequences that lie one after the other in T. No host wait."""
    index_SR = expert_index_TK.reshape(num_sequences, -1)
    if index_SR.is_cuda:
        from moeplan.kernels import router_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

        return router_triton.count_tokens(index_SR, num_experts)
    counts_SE = torch.zeros(num_sequences, num_experts, device=index_SR.device)
    return counts_SE.scatter_add_(1, index_SR, torch.ones((), device=index_SR.device).expand_as(index_SR))


def balance_loss(share_SE: Tensor, fraction_SE: Tensor, num_tokens: int, coeff: float) -> Tensor:
    """Balancing loss coeff * E * sum_e f_e P_e, a mean over ``num_tokens``; coeff when balanced (report section 7).

    f is the routed fraction of each set of tokens (a micro-batch, sequence or document): copies / (tokens K). P is the
    mean of the shares, whose sums over the tokens of each set are given. Where several ranks hold a set, pass its
    fractions over all of them: the results of the ranks then add up to the loss of all.
    """
    loss: Tensor = (share_SE * fraction_SE).sum() * (coeff * share_SE.shape[1] / num_tokens)
    return loss


def z_loss(logits_TE: Tensor, coeff: float, num_tokens: int, is_real_T: Tensor | None = None) -> Tensor:
    """Loss of large logits, summed over tokens that are no padding: coeff / ``num_tokens`` * logsumexp(logits)**2."""
    squares_T = torch.logsumexp(logits_TE, -1).square()
    if is_real_T is not None:
        squares_T = squares_T * is_real_T
    return coeff / num_tokens * squares_T.sum()


def updated_bias(bias_E: Tensor, num_copies_E: Tensor, rate: float) -> Tensor:
    """Bias after one step of aux-free balancing: bias + rate * sign(mean load - load), loads summed over all ranks."""
    return bias_E + rate * torch.sign(num_copies_E.mean() - num_copies_E)


class _HalfLogits(torch.autograd.Function):
    """Logits in fp32 of 16-bit x and weight, whose products fp32 holds exactly.

    Gradients are products in 16 bits: those of x and weight are rounded to that anyway.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        ctx.main_grad = main_grad_of(weight_EH)
        if x_TH.is_cuda:
            return torch.mm(x_TH, weight_EH.t(), out_dtype=torch.float32)
        return F.linear(x_TH.float(), weight_EH.float())

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        x_TH, weight_EH = ctx.saved_tensors
        grad_TE, main = grad_TE.to(x_TH.dtype), ctx.main_grad
        grad_x_TH = grad_TE @ weight_EH
        if main is None:
            return grad_x_TH, grad_TE.t() @ x_TH
        now_or_later(lambda: add_weight_grad_(main, grad_TE, x_TH))
        return grad_x_TH, None


def attach_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return x; in backward ``loss`` (a scalar) receives gradient 1, as if it had been added to the loss of the step.

    So a loss inside a layer needs no way out through pipeline stages.
    """
    attached: Tensor = _AttachLoss.apply(x, loss)
    return attached


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_like = loss.new_empty(0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.loss_like.new_ones(())
