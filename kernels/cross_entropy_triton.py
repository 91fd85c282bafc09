"""Cross entropy's passes in one kernel each: read the logits once; read them once and write their gradient over them.

Shapes: T tokens, V vocabulary entries of this rank.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeplan.kernels.logit_stats import LogitStats
from moeplan.kernels.triton_launch import block_of, compute_dtype


@triton.jit
def _stats(
    logits_ptr,
    target_ptr,
    highest_ptr,
    sum_ptr,
    chosen_ptr,
    V,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = logits_ptr + token * V
    # A running maximum and sum in every lane, put together at the end. -1e30 so that no difference is infinite.
    highest = tl.full((BLOCK,), -1e30, DTYPE)
    total = tl.zeros((BLOCK,), DTYPE)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        logit = tl.load(row + cols, cols < V, float("-inf")).to(DTYPE)
        higher = tl.maximum(highest, logit)
        total = total * tl.exp(highest - higher) + tl.exp(logit - higher)
        highest = higher
    row_highest = tl.max(highest, 0)
    tl.store(highest_ptr + token, row_highest)
    tl.store(sum_ptr + token, tl.sum(total * tl.exp(highest - row_highest), 0))
    target = tl.load(target_ptr + token)
    chosen = tl.load(row + tl.maximum(target, 0)).to(DTYPE)
    tl.store(chosen_ptr + token, tl.where(target >= 0, chosen, 0.0))


@triton.jit
def _gradient(
    logits_ptr,
    log_sum_ptr,
    grad_ptr,
    target_ptr,
    V,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = logits_ptr + token * V
    log_sum = tl.load(log_sum_ptr + token).to(DTYPE)
    grad = tl.load(grad_ptr + token).to(DTYPE)
    target = tl.load(target_ptr + token)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < V
        probs = tl.exp(tl.load(row + cols, mask, 0).to(DTYPE) - log_sum)
        probs = tl.where(cols == target, probs - 1, probs)
        tl.store(row + cols, (probs * grad).to(logits_ptr.dtype.element_ty), mask)


def logit_stats(logits_TV: Tensor, target_T: Tensor) -> LogitStats:
    """See :func:`moeplan.kernels.cross_entropy.logit_stats`."""
    num_tokens, width = logits_TV.shape
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    stats = LogitStats(*torch.empty((3, num_tokens), dtype=dtype, device=logits_TV.device))
    _stats[num_tokens,](logits_TV, target_T, *stats, width, compute_dtype(logits_TV), block_of(width))
    return stats


def logit_gradient_(logits_TV: Tensor, log_sum_T: Tensor, grad_T: Tensor, target_T: Tensor) -> Tensor:
    """See :func:`moeplan.kernels.cross_entropy.logit_gradient_`."""
    num_tokens, width = logits_TV.shape
    vectors = (log_sum_T, grad_T.contiguous(), target_T)
    _gradient[num_tokens,](logits_TV, *vectors, width, compute_dtype(logits_TV), block_of(width))
    return logits_TV
