"""The short convolution of documents in one pass each way, where torch pads, transposes and puts together again.

Backward makes sums and their SiLU again from the input, K times each, which are in the cache.

Shapes: B sequences of S positions, T = B * S tokens, C channels, K taps, P programs along tokens.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moeplan.kernels.triton_launch import compute_dtype

_TOKENS, _CHANNELS = 32, 64  # of a program


@triton.jit
def _sums(
    x_ptr, weight_ptr, bias_ptr, row, first, channel, is_there, C, stride, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """What SiLU takes, of the tokens ``row`` whose documents begin at ``first``."""
    total = tl.zeros((BLOCK_T, BLOCK_C), DTYPE)
    for tap in tl.static_range(K):
        source = row - (K - 1 - tap)
        seen = is_there & (source >= first)[:, None]
        x = tl.load(x_ptr + source[:, None] * stride + channel[None, :], seen, 0).to(DTYPE)
        total += x * tl.load(weight_ptr + channel * K + tap, channel < C, 0).to(DTYPE)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, channel < C, 0).to(DTYPE)[None, :]
    return total


@triton.jit
def _forward(
    x_ptr, weight_ptr, bias_ptr, first_ptr, y_ptr, T, C, stride, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_there = (row < T)[:, None] & (channel < C)[None, :]
    first = tl.load(first_ptr + row, row < T, 0)
    total = _sums(
        x_ptr, weight_ptr, bias_ptr, row, first, channel, is_there, C, stride, K, HAS_BIAS, DTYPE, BLOCK_T, BLOCK_C
    )
    y = total / (1 + tl.exp(-total))
    tl.store(y_ptr + row[:, None] * C + channel[None, :], y.to(y_ptr.dtype.element_ty), is_there)


@triton.jit
def _backward(
    grad_ptr, x_ptr, weight_ptr, bias_ptr, first_ptr, grad_x_ptr, grad_weight_ptr, T, C, stride, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < C
    grad_x = tl.zeros((BLOCK_T, BLOCK_C), DTYPE)
    part = grad_weight_ptr + tl.program_id(0).to(tl.int64) * (K + 1) * C + channel
    for ahead in tl.static_range(K):
        # Token row looks at row - ahead by tap K - 1 - ahead, where both are of one document.
        later = row + ahead
        first = tl.load(first_ptr + later, later < T, T)
        is_there = ((later < T) & (first <= row))[:, None] & is_channel[None, :]
        total = _sums(
            x_ptr, weight_ptr, bias_ptr, later, first, channel, is_there, C, stride, K, HAS_BIAS, DTYPE, BLOCK_T,
            BLOCK_C,
        )  # fmt: skip
        opening = 1 / (1 + tl.exp(-total))
        grad = tl.load(grad_ptr + later[:, None] * C + channel[None, :], is_there, 0).to(DTYPE)
        grad *= opening * (1 + total * (1 - opening))
        tap = K - 1 - ahead
        grad_x += grad * tl.load(weight_ptr + channel * K + tap, is_channel, 0).to(DTYPE)[None, :]
        x = tl.load(x_ptr + row[:, None] * stride + channel[None, :], is_there & (row < T)[:, None], 0).to(DTYPE)
        tl.store(part + tap * C, tl.sum(grad * x, 0), is_channel)
        if ahead == 0:
            tl.store(part + K * C, tl.sum(grad, 0), is_channel)
    place = row[:, None] * C + channel[None, :]
    tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), (row < T)[:, None] & is_channel[None, :])


def causal_conv(x_BSC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, documents: tuple[int, ...]) -> Tensor:
    """See :func:`moeplan.kernels.causal_conv.causal_conv`."""
    first_T = _first_tokens(documents, len(x_BSC), x_BSC.device)
    y_BSC: Tensor = _CausalConv.apply(x_BSC, weight_CK, bias_C, first_T)
    return y_BSC


@lru_cache(maxsize=64)
def _first_tokens(documents: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """Where the document of each token begins. Made once, as a CUDA graph takes no copy from the host."""
    lengths = torch.tensor(documents * batch)
    starts = torch.tensor(list(accumulate(documents * batch, initial=0))[:-1])
    return starts.repeat_interleave(lengths).to(device)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, first_T: Tensor) -> Tensor:
        if x_BSC.stride(2) != 1 or x_BSC.stride(0) != x_BSC.shape[1] * x_BSC.stride(1):
            x_BSC = x_BSC.contiguous()
        weight_CK = weight_CK.contiguous()
        ctx.save_for_backward(x_BSC, weight_CK, bias_C, first_T)
        y_BSC = torch.empty(x_BSC.shape, dtype=x_BSC.dtype, device=x_BSC.device)
        num_tokens, num_channels = len(first_T), x_BSC.shape[2]
        _forward[_grid(num_tokens, num_channels)](
            x_BSC, weight_CK, weight_CK if bias_C is None else bias_C, first_T, y_BSC, num_tokens, num_channels,
            x_BSC.stride(1), weight_CK.shape[1], bias_C is not None, compute_dtype(x_BSC), _TOKENS, _CHANNELS,
        )  # fmt: skip
        return y_BSC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSC: Tensor) -> tuple[Tensor | None, ...]:
        x_BSC, weight_CK, bias_C, first_T = ctx.saved_tensors
        grad_BSC = grad_BSC.contiguous()
        num_tokens, (num_channels, taps) = len(first_T), weight_CK.shape
        grad_x_BSC, grid = torch.empty_like(grad_BSC), _grid(len(first_T), num_channels)
        sum_dtype = torch.promote_types(x_BSC.dtype, torch.float32)
        parts = grad_BSC.new_empty((grid[0], taps + 1, num_channels), dtype=sum_dtype)
        _backward[grid](
            grad_BSC, x_BSC, weight_CK, weight_CK if bias_C is None else bias_C, first_T, grad_x_BSC, parts, num_tokens,
            num_channels, x_BSC.stride(1), taps, bias_C is not None, compute_dtype(x_BSC), _TOKENS, _CHANNELS,
        )  # fmt: skip
        sums = parts.sum(0)
        grad_bias_C = None if bias_C is None else sums[taps].to(bias_C.dtype)
        return grad_x_BSC, sums[:taps].t().to(weight_CK.dtype), grad_bias_C, None


def _grid(num_tokens: int, num_channels: int) -> tuple[int, int]:
    return triton.cdiv(num_tokens, _TOKENS), triton.cdiv(num_channels, _CHANNELS)
