"""Rotary embedding in one kernel: read x once, write it once; backward turns the other way.

Shapes: B batch, L positions, N heads, D rotated width of a head.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moeplan.kernels.triton_launch import compute_dtype

_HEADS_A_PROGRAM = 16


def apply_rotary(x_BLND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See :func:`moeplan.kernels.rotary.apply_rotary`."""
    y_BLND: Tensor = _Rotary.apply(x_BLND, cos, sin)
    return y_BLND


@triton.jit
def _rotate(
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    L,
    N,
    stride_b,
    stride_l,
    stride_n,
    HALF,
    SIGN: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // L, token % L
    heads = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    half = tl.arange(0, BLOCK_H)
    mask_h = half < HALF
    mask = (heads[:, None] < N) & mask_h[None, :]
    cos = tl.load(cos_ptr + position * HALF + half, mask_h, 0).to(DTYPE)[None, :]
    sin = tl.load(sin_ptr + position * HALF + half, mask_h, 0).to(DTYPE)[None, :] * SIGN
    source = x_ptr + batch * stride_b + position * stride_l + heads[:, None] * stride_n + half[None, :]
    first = tl.load(source, mask, 0).to(DTYPE)
    second = tl.load(source + HALF, mask, 0).to(DTYPE)
    target = y_ptr + (token * N + heads[:, None]) * 2 * HALF + half[None, :]
    tl.store(target, (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask)
    tl.store(target + HALF, (second * cos + first * sin).to(y_ptr.dtype.element_ty), mask)


def _turned(x_BLND: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    B, L, N, D = x_BLND.shape
    if x_BLND.stride(3) != 1:
        x_BLND = x_BLND.contiguous()
    y_BLND = torch.empty((B, L, N, D), dtype=x_BLND.dtype, device=x_BLND.device)
    block_n = min(_HEADS_A_PROGRAM, triton.next_power_of_2(N))
    _rotate[B * L, triton.cdiv(N, block_n)](
        x_BLND, y_BLND, cos, sin, L, N, *x_BLND.stride()[:3], D // 2, sign,
        compute_dtype(x_BLND), block_n, triton.next_power_of_2(D // 2),
    )  # fmt: skip
    return y_BLND


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _turned(x_BLND, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLND: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad_BLND, cos, sin, -1), None, None
