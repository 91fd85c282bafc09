"""Norm and rotation of queries and keys in one pass each way, straight out of and back into one projection.

Apart they take three passes each way over queries and keys, and one more to put their gradients together. Values have a
kernel as well, because torch copies parts of rows element by element.

Shapes: B batch, S positions, T = B * S tokens, O heads in the projection, N heads of one kind, D width of a head,
R = T * N rows, P programs.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moeplan.kernels.triton_launch import compute_dtype, num_processors

_ELEMENTS_A_PROGRAM = 2048
_PROGRAMS_A_PROCESSOR = 7  # what a Hopper multiprocessor runs at once: 72 registers a thread, of 4 warps each


@triton.jit
def _places(first, R, S, N, HALF, ROWS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Token, head and position of rows from ``first`` on, channels of a half, and which of both exist."""
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    half = tl.arange(0, BLOCK_H)[None, :]
    token = row // N
    return token[:, None], (row % N)[:, None], (token % S)[:, None], half, (row < R)[:, None] & (half < HALF)


@triton.jit
def _rotate_heads(
    x_ptr, weight_ptr, y_ptr, cos_ptr, sin_ptr, R, S, N, stride_t, eps, HALF,
    HAS_NORM: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token, head, position, half, mask = _places(tl.program_id(0) * ROWS, R, S, N, HALF, ROWS, BLOCK_H)
    source = x_ptr + token * stride_t + head * 2 * HALF + half
    left, right = tl.load(source, mask, 0).to(DTYPE), tl.load(source + HALF, mask, 0).to(DTYPE)
    if HAS_NORM:
        inverse_rms = tl.rsqrt(tl.sum(left * left + right * right, 1) / (2 * HALF) + eps)[:, None]
        left *= inverse_rms * tl.load(weight_ptr + half, half < HALF, 0).to(DTYPE)
        right *= inverse_rms * tl.load(weight_ptr + HALF + half, half < HALF, 0).to(DTYPE)
    cos = tl.load(cos_ptr + position * HALF + half, mask, 0).to(DTYPE)
    sin = tl.load(sin_ptr + position * HALF + half, mask, 0).to(DTYPE)
    target = y_ptr + (token * N + head) * 2 * HALF + half
    tl.store(target, (left * cos - right * sin).to(y_ptr.dtype.element_ty), mask)
    tl.store(target + HALF, (right * cos + left * sin).to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _rotate_heads_backward(
    grad_ptr, x_ptr, weight_ptr, grad_x_ptr, grad_weight_ptr, cos_ptr, sin_ptr, R, S, N, grad_b, grad_s, grad_n,
    stride_t, eps, HALF,
    HAS_NORM: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    sum_left = tl.zeros((ROWS, BLOCK_H), DTYPE)
    sum_right = tl.zeros((ROWS, BLOCK_H), DTYPE)
    for first in range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS):
        token, head, position, half, mask = _places(first, R, S, N, HALF, ROWS, BLOCK_H)
        grad = grad_ptr + (token // S) * grad_b + position * grad_s + head * grad_n + half
        grad_left, grad_right = tl.load(grad, mask, 0).to(DTYPE), tl.load(grad + HALF, mask, 0).to(DTYPE)
        cos = tl.load(cos_ptr + position * HALF + half, mask, 0).to(DTYPE)
        sin = tl.load(sin_ptr + position * HALF + half, mask, 0).to(DTYPE)
        left, right = grad_left * cos + grad_right * sin, grad_right * cos - grad_left * sin
        place = token * stride_t + head * 2 * HALF + half
        if HAS_NORM:
            x_left = tl.load(x_ptr + place, mask, 0).to(DTYPE)
            x_right = tl.load(x_ptr + place + HALF, mask, 0).to(DTYPE)
            inverse_rms = tl.rsqrt(tl.sum(x_left * x_left + x_right * x_right, 1) / (2 * HALF) + eps)[:, None]
            x_left *= inverse_rms
            x_right *= inverse_rms
            sum_left += left * x_left
            sum_right += right * x_right
            left *= tl.load(weight_ptr + half, half < HALF, 0).to(DTYPE)
            right *= tl.load(weight_ptr + HALF + half, half < HALF, 0).to(DTYPE)
            mean = (tl.sum(left * x_left + right * x_right, 1) / (2 * HALF))[:, None]
            left = (left - x_left * mean) * inverse_rms
            right = (right - x_right * mean) * inverse_rms
        tl.store(grad_x_ptr + place, left.to(grad_x_ptr.dtype.element_ty), mask)
        tl.store(grad_x_ptr + place + HALF, right.to(grad_x_ptr.dtype.element_ty), mask)
    if HAS_NORM:
        half = tl.arange(0, BLOCK_H)
        part = grad_weight_ptr + tl.program_id(0).to(tl.int64) * 2 * HALF + half
        tl.store(part, tl.sum(sum_left, 0), half < HALF)
        tl.store(part + HALF, tl.sum(sum_right, 0), half < HALF)


@triton.jit
def _copy_heads(
    x_ptr, y_ptr, R, S, N, D, x_stride_b, x_stride_s, x_stride_n, y_stride_t, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    token, head, mask = (row // N)[:, None], (row % N)[:, None], (row < R)[:, None] & (col < D)
    source = x_ptr + (token // S) * x_stride_b + (token % S) * x_stride_s + head * x_stride_n + col
    tl.store(y_ptr + token * y_stride_t + head * D + col, tl.load(source, mask, 0), mask)


def split_qkv(
    qkv_BSOD: Tensor, num_kv_heads: int, tables: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`moeplan.kernels.split_qkv.split_qkv`."""
    heads = _SplitQkv.apply(qkv_BSOD, *(norms or (None, None)), *tables, num_kv_heads, eps)
    return cast("tuple[Tensor, Tensor, Tensor]", heads)


def _tile(width: int) -> tuple[int, int]:
    """Rows of a program, and columns of half a row."""
    block = max(1, int(triton.next_power_of_2(width // 2)))
    return max(1, _ELEMENTS_A_PROGRAM // (2 * block)), block


class _SplitQkv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_BSOD: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor,
        num_kv_heads: int, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        qkv_BSOD, cos, sin = qkv_BSOD.contiguous(), cos.contiguous(), sin.contiguous()
        ctx.shape, ctx.num_kv_heads, ctx.eps = qkv_BSOD.shape, num_kv_heads, eps
        parts = qkv_BSOD.tensor_split((-2 * num_kv_heads, -num_kv_heads), 2)
        q, k = (_turned(x, weight, cos, sin, eps) for x, weight in zip(parts, (q_norm, k_norm), strict=False))
        ctx.save_for_backward(None if q_norm is None else qkv_BSOD, q_norm, k_norm, cos, sin)
        return q, k, parts[2] if q_norm is not None else _copied(parts[2], torch.empty_like(k))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_BSOD, q_norm, k_norm, cos, sin = ctx.saved_tensors
        grad_qkv_BSOD = grads[0].new_empty(ctx.shape)
        cuts = (-2 * ctx.num_kv_heads, -ctx.num_kv_heads)
        grad_parts = grad_qkv_BSOD.tensor_split(cuts, 2)
        x_parts = grad_parts if qkv_BSOD is None else qkv_BSOD.tensor_split(cuts, 2)
        grad_norms = [
            _turned_back(grads[index], x_parts[index], weight, grad_parts[index], cos, sin, ctx.eps)
            for index, weight in enumerate((q_norm, k_norm))
        ]
        _copied(grads[2], grad_parts[2])
        return grad_qkv_BSOD, *grad_norms, None, None, None, None


def _turned(x_BSND: Tensor, weight_D: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    B, S, N, D = x_BSND.shape
    y_BSND = torch.empty((B, S, N, D), dtype=x_BSND.dtype, device=x_BSND.device)
    rows, block = _tile(D)
    if y_BSND.numel():
        _rotate_heads[triton.cdiv(B * S * N, rows),](
            x_BSND, x_BSND if weight_D is None else weight_D, y_BSND, cos, sin, B * S * N, S, N, x_BSND.stride(1), eps,
            D // 2, weight_D is not None, compute_dtype(x_BSND), rows, block,
        )  # fmt: skip
    return y_BSND


def _turned_back(
    grad_BSND: Tensor, x_BSND: Tensor, weight_D: Tensor | None, grad_x_BSND: Tensor, cos: Tensor, sin: Tensor,
    eps: float,
) -> Tensor | None:  # fmt: skip
    """Writes the gradient of x into ``grad_x_BSND``; that of the weight, where there is one."""
    B, S, N, D = grad_BSND.shape
    if grad_BSND.stride(3) != 1:
        grad_BSND = grad_BSND.contiguous()
    rows, block = _tile(D)
    num_programs = min(triton.cdiv(B * S * N, rows), _PROGRAMS_A_PROCESSOR * num_processors(grad_BSND.device))
    dtype = torch.promote_types(grad_BSND.dtype, torch.float32)
    sums_PD = grad_BSND.new_empty((num_programs if weight_D is not None else 0, D), dtype=dtype)
    if num_programs:
        _rotate_heads_backward[num_programs,](
            grad_BSND, x_BSND, grad_BSND if weight_D is None else weight_D, grad_x_BSND, sums_PD, cos, sin, B * S * N,
            S, N, *grad_BSND.stride()[:3], grad_x_BSND.stride(1), eps, D // 2, weight_D is not None,
            compute_dtype(grad_BSND), rows, block,
        )  # fmt: skip
    return None if weight_D is None else sums_PD.sum(0).to(weight_D.dtype)


def _copied(x_BSND: Tensor, y_BSND: Tensor) -> Tensor:
    """``y_BSND``, after x is copied to it; the heads of each of its tokens lie one after the other."""
    B, S, N, D = x_BSND.shape
    if x_BSND.stride(3) != 1:
        x_BSND = x_BSND.contiguous()
    block = int(triton.next_power_of_2(D))
    rows = max(1, _ELEMENTS_A_PROGRAM // block)
    if x_BSND.numel():
        _copy_heads[triton.cdiv(B * S * N, rows),](
            x_BSND, y_BSND, B * S * N, S, N, D, *x_BSND.stride()[:3], y_BSND.stride(1), rows, block
        )
    return y_BSND
