"""Which experts a token goes to, with what weight, and the losses that balance them (report section 7).

Shapes: T tokens, E experts, K experts per token, H width, S sequences.
"""
# ruff: noqa: N815 - shape suffixes

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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


class Totals(NamedTuple):
    """Sums over all tokens: their shares, and copies routed to each expert, which have no gradient."""

    share_E: Tensor
    num_copies_E: Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """``probs_TK`` weigh the chosen experts ``expert_index_TK``.

    ``share_TE`` are scores that sum to 1 over all E; where ``totals`` are given, kernels leave them out.
    """

    probs_TK: Tensor
    expert_index_TK: Tensor
    share_TE: Tensor | None = None
    totals: Totals | None = None


def router_logits(x_TH: Tensor, weight_EH: Tensor) -> tuple[Tensor, Tensor]:
    """The input as it came and logits_TE, in fp32 at least; input and weight, of one dtype, are kept for backward.

    What else reads x should read the x returned: backward then adds the gradient of the logits to that of the others in
    the same product, and in place, so none of them may hand its gradient of x to anyone else.
    """
    return cast("tuple[Tensor, Tensor]", _Logits.apply(x_TH, weight_EH))


def route(
    logits_TE: Tensor,
    options: RouterOptions,
    bias_E: Tensor | None = None,
    expert_index_TK: Tensor | None = None,
    *,
    totals: bool = False,
) -> Routing:
    """Choose K experts a token by score plus ``bias_E`` and weigh them by score alone.

    Weights are divided by their sum over the chosen K (where K > 1 and ``normalize_top_k``), then multiplied by the
    scaling factor; a softmax normalised so equals a softmax over the chosen logits. Gradients flow through
    ``probs_TK`` and shares. One kernel each way on CUDA, where groups allow it. Experts are taken from
    ``expert_index_TK`` where given. ``totals``: sums over all tokens are wanted, which may be all there is of shares.
    """
    if logits_TE.is_cuda and expert_index_TK is None:
        from moeplan.kernels import router_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

        if router_triton.is_supported(logits_TE.shape[1], options.num_groups):
            probs_TK, index_TK, share, num_copies_E = router_triton.route(logits_TE, bias_E, options, _TINY, totals)
            if num_copies_E is None:
                return Routing(probs_TK, index_TK, share)
            return Routing(probs_TK, index_TK, None, Totals(share, num_copies_E))
    routing = route_reference(logits_TE, options, bias_E, expert_index_TK)
    if not totals or routing.share_TE is None:
        return routing
    num_copies_E = count_tokens(routing.expert_index_TK, logits_TE.shape[1])[0]
    return replace(routing, totals=Totals(routing.share_TE.sum(0), num_copies_E))


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


def balance_gradient(num_copies_SE: Tensor, set_copies: float | Tensor, num_tokens: int, coeff: float) -> Tensor:
    """Gradient, by a share of expert e, of the balancing loss coeff * E * sum_e f_e P_e (report section 7).

    The loss is a mean over ``num_tokens``, and coeff when balanced. f is the routed fraction of each set of tokens (a
    micro-batch, sequence or document): ``num_copies_SE`` of ``set_copies``, copies of all its tokens. P is the mean of
    the shares, so the loss is the sum over tokens of shares times this gradient. Where several ranks hold a set, pass
    its copies on all of them: the results of the ranks then add up to the loss of all.
    """
    return num_copies_SE * (coeff * num_copies_SE.shape[1] / num_tokens / set_copies)


def z_loss(logits_TE: Tensor, coeff: float, num_tokens: int, is_real_T: Tensor | None = None) -> Tensor:
    """Loss of large logits, summed over tokens that are no padding: coeff / ``num_tokens`` * logsumexp(logits)**2."""
    squares_T = torch.logsumexp(logits_TE, -1).square()
    if is_real_T is not None:
        squares_T = squares_T * is_real_T
    return coeff / num_tokens * squares_T.sum()


def updated_bias(bias_E: Tensor, num_copies_E: Tensor, rate: float) -> Tensor:
    """Bias after one step of aux-free balancing: bias + rate * sign(mean load - load), loads summed over all ranks."""
    return bias_E + rate * torch.sign(num_copies_E.mean() - num_copies_E)


class _Logits(torch.autograd.Function):
    """Logits of 16-bit x and weight in fp32, which holds their products exactly.

    Gradients are products in 16 bits: those of x and weight are rounded to that anyway.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TH, weight_EH)
        ctx.main_grad = main_grad_of(weight_EH)
        x_out_TH = x_TH.view_as(x_TH)
        if x_TH.dtype not in (torch.bfloat16, torch.float16):
            return x_out_TH, F.linear(x_TH, weight_EH)
        if x_TH.is_cuda:
            return x_out_TH, torch.mm(x_TH, weight_EH.t(), out_dtype=torch.float32)
        return x_out_TH, F.linear(x_TH.float(), weight_EH.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x_TH: Tensor | None, grad_TE: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if grad_TE is None:
            return grad_x_TH, None
        x_TH, weight_EH = ctx.saved_tensors
        grad_TE, main = grad_TE.to(x_TH.dtype), ctx.main_grad
        if ctx.needs_input_grad[0]:
            others_TH = grad_x_TH.contiguous() if grad_x_TH is not None else None
            grad_x_TH = grad_TE @ weight_EH if others_TH is None else others_TH.addmm_(grad_TE, weight_EH)
        if not ctx.needs_input_grad[1]:
            return grad_x_TH, None
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


def attach_gradient(x: Tensor, at: Tensor, grad_at: Tensor) -> Tensor:
    """Return x; in backward ``at`` receives ``grad_at``: :func:`attach_loss` of a loss whose value nobody asks for."""
    attached: Tensor = _AttachGradient.apply(x, at, grad_at)
    return attached


class _AttachGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, grad_at: Tensor) -> Tensor:
        assert grad_at.shape == at.shape
        ctx.save_for_backward(grad_at)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_at,) = ctx.saved_tensors
        return grad, grad_at, None
