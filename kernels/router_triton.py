"""Routing in one kernel each way, where torch takes thirty: scores, choice, weights and shares of a block of tokens.

Shapes: T tokens, E experts, K experts per token, S sequences.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import TYPE_CHECKING, Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moeplan.kernels.triton_launch import compute_dtype, num_processors

if TYPE_CHECKING:
    from moeplan.kernels.router import RouterOptions

_ELEMENTS_A_PROGRAM = 1024  # tokens times experts: what 4 warps hold without spilling
_COUNT_BLOCK = 1024
_PROGRAMS_A_PROCESSOR = 8  # where programs sum over tokens: each leaves its part


def is_supported(num_experts: int, num_groups: int) -> bool:
    """Whether :func:`route` takes this shape: groups are cut out of a block, whose sides are powers of two."""
    return num_groups == 1 or (_is_power_of_2(num_experts) and _is_power_of_2(num_groups))


def _is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0


@triton.jit
def _scores(
    logits_ptr,
    token,
    expert,
    T,
    E,
    SIGMOID: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Places of the logits of a tile, which of them there are, and their scores."""
    mask = (token < T)[:, None] & (expert < E)
    place = token[:, None].to(tl.int64) * E + expert
    logits = tl.load(logits_ptr + place, mask, float("-inf")).to(DTYPE)
    # Lines beyond the last token: any finite number, so that nothing divides 0 by 0.
    logits = tl.where((token < T)[:, None], logits, 0.0)
    if SIGMOID:
        score = tl.where(expert < E, 1 / (1 + tl.exp(-logits)), 0.0)
    else:
        shifted = tl.exp(logits - tl.max(logits, 1)[:, None])
        score = shifted / tl.sum(shifted, 1)[:, None]
    return place, mask, score


@triton.jit
def _keep_groups(
    key,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """``key`` with -inf in all but the TOP_GROUPS groups whose best PER_GROUP sum highest."""
    MEMBERS: tl.constexpr = BLOCK_E // GROUPS
    members = tl.reshape(key, (BLOCK_T, GROUPS, MEMBERS))
    place = tl.arange(0, MEMBERS)[None, None, :]
    left = members
    total = tl.zeros((BLOCK_T, GROUPS), key.dtype)
    for _ in tl.static_range(PER_GROUP):
        total += tl.max(left, 2)
        left = tl.where(place == tl.argmax(left, 2)[:, :, None], float("-inf"), left)
    group = tl.arange(0, GROUPS)[None, :]
    kept = tl.zeros((BLOCK_T, GROUPS), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best = group == tl.argmax(total, 1)[:, None]
        kept = tl.where(best, 1, kept)
        total = tl.where(best, float("-inf"), total)
    return tl.reshape(tl.where(kept[:, :, None] > 0, members, float("-inf")), (BLOCK_T, BLOCK_E))


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    probs_ptr,
    index_ptr,
    share_ptr,
    T,
    E,
    scale,
    tiny,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TOTALS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.arange(0, BLOCK_E)[None, :]
    k_place = tl.arange(0, BLOCK_K)[None, :]
    share_total = tl.zeros((BLOCK_T, BLOCK_E), DTYPE)
    copies = tl.zeros((BLOCK_T, BLOCK_E), tl.int32)
    for first in range(tl.program_id(0) * BLOCK_T, T, tl.num_programs(0) * BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        place, mask, score = _scores(logits_ptr, token, expert, T, E, SIGMOID, DTYPE)
        share = score
        if SIGMOID:
            share = score / (tl.sum(score, 1)[:, None] + tiny)
        if HAS_TOTALS:
            share_total += tl.where(mask, share, 0.0)
        else:
            tl.store(share_ptr + place, share, mask)
        key = score
        if HAS_BIAS:
            key += tl.load(bias_ptr + expert, expert < E, 0).to(DTYPE)
        key = tl.where(expert < E, key, float("-inf"))
        if GROUPS > 1:
            key = _keep_groups(key, GROUPS, TOP_GROUPS, PER_GROUP, BLOCK_T, BLOCK_E)
        probs = tl.zeros((BLOCK_T, BLOCK_K), DTYPE)
        index = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
        for k in tl.static_range(K):
            best = tl.minimum(tl.argmax(key, 1), E - 1)  # of NaN, whose loss ends the run, it may be past the last
            is_best = expert == best[:, None]
            probs = tl.where(k_place == k, tl.sum(tl.where(is_best, score, 0.0), 1)[:, None], probs)
            index = tl.where(k_place == k, best[:, None], index)
            key = tl.where(is_best, float("-inf"), key)
            if HAS_TOTALS:
                copies += (is_best & mask).to(tl.int32)
        if NORMALIZE:
            probs = probs / (tl.sum(probs, 1)[:, None] + tiny)
        mask_k = (token < T)[:, None] & (k_place < K)
        place_k = token[:, None].to(tl.int64) * K + k_place
        tl.store(probs_ptr + place_k, probs * scale, mask_k)
        tl.store(index_ptr + place_k, index.to(tl.int64), mask_k)
    if HAS_TOTALS:
        column = tl.arange(0, BLOCK_E)
        total = share_ptr + tl.program_id(0) * 2 * E + column
        tl.store(total, tl.sum(share_total, 0), column < E)
        tl.store(total + E, tl.sum(copies, 0).to(DTYPE), column < E)


@triton.jit
def _route_backward(
    grad_probs_ptr,
    grad_share_ptr,
    logits_ptr,
    index_ptr,
    grad_logits_ptr,
    T,
    E,
    share_stride_t,
    share_stride_e,
    scale,
    tiny,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)[None, :]
    place, mask, score = _scores(logits_ptr, token, expert, T, E, SIGMOID, DTYPE)
    grad = tl.zeros((BLOCK_T, BLOCK_E), DTYPE)
    chosen = tl.zeros((BLOCK_T, BLOCK_E), tl.int32)
    for k in tl.static_range(K):
        index = tl.load(index_ptr + token.to(tl.int64) * K + k, token < T, 0)
        is_k = expert == index[:, None]
        grad_k = tl.load(grad_probs_ptr + token.to(tl.int64) * K + k, token < T, 0).to(DTYPE)
        grad = tl.where(is_k, grad_k[:, None] * scale, grad)
        chosen = tl.where(is_k, 1, chosen)
    if NORMALIZE:
        total = tl.sum(tl.where(chosen > 0, score, 0.0), 1)[:, None] + tiny
        grad = tl.where(chosen > 0, grad - tl.sum(grad * score, 1)[:, None] / total, 0.0) / total
    if HAS_SHARE:
        share_place = token[:, None].to(tl.int64) * share_stride_t + expert * share_stride_e
        grad_share = tl.load(grad_share_ptr + share_place, mask, 0).to(DTYPE)
        if SIGMOID:
            total = tl.sum(score, 1)[:, None] + tiny
            grad_share = (grad_share - tl.sum(grad_share * score, 1)[:, None] / total) / total
        grad += grad_share
    if SIGMOID:
        grad *= score * (1 - score)
    else:
        grad = score * (grad - tl.sum(grad * score, 1)[:, None])
    tl.store(grad_logits_ptr + place, grad, mask)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        options: "RouterOptions",
        tiny: float,
        totals: bool,  # noqa: FBT001 - autograd passes by position
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        logits_TE = logits_TE.contiguous()
        T, E = logits_TE.shape
        block_t, block_e = _blocks(E)
        num_programs = triton.cdiv(T, block_t)
        share_shape: tuple[int, ...] = (T, E)
        if totals:
            num_programs = min(num_programs, _PROGRAMS_A_PROCESSOR * num_processors(logits_TE.device))
            share_shape = (num_programs, 2, E)
        probs_TK = logits_TE.new_empty((T, options.top_k))
        index_TK = torch.empty((T, options.top_k), dtype=torch.int64, device=logits_TE.device)
        share = logits_TE.new_empty(share_shape)
        ctx.options, ctx.tiny = options, tiny
        ctx.normalize = options.normalize_top_k and options.top_k > 1
        ctx.save_for_backward(logits_TE, index_TK)
        ctx.set_materialize_grads(False)
        if T:
            per_group = options.group_score_experts or max(1, options.top_k // options.top_groups)
            _route[num_programs,](
                logits_TE, logits_TE if bias_E is None else bias_E, probs_TK, index_TK, share, T, E,
                options.scaling_factor, tiny, options.top_k, options.num_groups, options.top_groups,
                per_group, options.score_function == "sigmoid", ctx.normalize,
                bias_E is not None, totals, compute_dtype(logits_TE), block_t, block_e,
                triton.next_power_of_2(options.top_k),
            )  # fmt: skip
        if not totals:
            ctx.mark_non_differentiable(index_TK)
            return probs_TK, index_TK, share, None
        share_E, num_copies_E = share.sum(0)
        ctx.mark_non_differentiable(index_TK, num_copies_E)
        return probs_TK, index_TK, share_E, num_copies_E

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        grad_probs_TK, _, grad_share, _ = grads
        logits_TE, index_TK = ctx.saved_tensors
        T, E = logits_TE.shape
        options, (block_t, block_e) = ctx.options, _blocks(E)
        if grad_probs_TK is None:
            grad_probs_TK = logits_TE.new_zeros(index_TK.shape)
        grad_logits_TE = torch.empty_like(logits_TE)
        # That of a total is that of every token.
        strides: tuple[int, ...] = (0, 0) if grad_share is None else grad_share.expand(T, E).stride()
        if T:
            _route_backward[triton.cdiv(T, block_t),](
                grad_probs_TK.contiguous(), logits_TE if grad_share is None else grad_share, logits_TE,
                index_TK, grad_logits_TE, T, E, *strides, options.scaling_factor, ctx.tiny, options.top_k,
                options.score_function == "sigmoid", ctx.normalize, grad_share is not None,
                compute_dtype(logits_TE), block_t, block_e,
            )  # fmt: skip
        return grad_logits_TE, None, None, None, None


def _blocks(num_experts: int) -> tuple[int, int]:
    """Tokens and experts of a program."""
    block_e = int(triton.next_power_of_2(num_experts))
    return max(1, _ELEMENTS_A_PROGRAM // block_e), block_e


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    options: "RouterOptions",
    tiny: float,
    totals: bool,  # noqa: FBT001 - as the caller had it
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Probabilities [T, K], indices [T, K] and shares [T, E]; see :func:`moeplan.kernels.router.route`.

    Under ``totals`` in the place of shares their sum over tokens [E], and copies routed to each expert [E].

    Of equal scores the expert of the lower number is chosen. ``tiny`` is added to sums that are divided by.
    """
    return cast("tuple[Tensor, Tensor, Tensor, Tensor | None]", _Route.apply(logits_TE, bias_E, options, tiny, totals))


@triton.jit
def _count(
    index_ptr,
    counts_ptr,
    R,
    E,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    sequence = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + sequence.to(tl.int64) * R + place, place < R, 0).to(tl.int32)
    counts = tl.histogram(index, BLOCK_E)
    expert = tl.arange(0, BLOCK_E)
    beyond = tl.sum((place >= R).to(tl.int32), 0)  # counted as expert 0
    counts = tl.where(expert == 0, counts - beyond, counts)
    target = counts_ptr + sequence * E + expert
    tl.atomic_add(target, counts.to(tl.float32), (expert < E) & (counts > 0))


def count_tokens(index_SR: Tensor, num_experts: int) -> Tensor:
    """Copies routed to each expert [S, E] in fp32; see :func:`moeplan.kernels.router.count_tokens`."""
    num_sequences, num_rows = index_SR.shape
    counts_SE = torch.zeros(num_sequences, num_experts, device=index_SR.device)
    if num_rows:
        _count[triton.cdiv(num_rows, _COUNT_BLOCK), num_sequences](
            index_SR.contiguous(), counts_SE, num_rows, num_experts, _COUNT_BLOCK, _bins(num_experts)
        )
    return counts_SE


def _bins(num_experts: int) -> int:
    """Bins of a histogram: a power of two, and at least a warp's worth."""
    return max(32, int(triton.next_power_of_2(num_experts)))
