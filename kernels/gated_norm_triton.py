"""Gated RMS norm in one kernel each way; backward reads x and gate and makes everything else again.

Shapes: T tokens, G heads of W channels, V weights of that width (one for all heads, or one a head), H = G / V heads a
weight, R = T * H rows of one weight, P programs a weight.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moeplan.kernels.triton_launch import compute_dtype, num_processors

MAX_WIDTH = 8192  # of a row that one program holds
_ELEMENTS_A_PROGRAM = 2048
_PROGRAMS_A_PROCESSOR = 8


@triton.jit
def _rows(
    x_ptr, gate_ptr, first, R, H, G, W, x_stride, gate_stride, eps, GATE_FIRST: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of rows from ``first`` on: where they lie in [T, G, W], which exist, x, its unit norm, 1/rms, gate, sigmoid."""
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    token, head = row // H, tl.program_id(1) * H + row % H
    mask = (row < R)[:, None] & (col < W)
    inside = head[:, None] * W + col
    x = tl.load(x_ptr + token[:, None] * x_stride + inside, mask, 0).to(DTYPE)
    gate = tl.load(gate_ptr + token[:, None] * gate_stride + inside, mask, 0).to(DTYPE)
    opening = 1 / (1 + tl.exp(-gate))
    normed = x * gate * opening if GATE_FIRST else x
    inverse_rms = tl.rsqrt(tl.sum(normed * normed, 1) / W + eps)[:, None]
    return token[:, None] * G * W + inside, mask, x, normed * inverse_rms, inverse_rms, gate, opening


@triton.jit
def _forward(
    x_ptr, gate_ptr, weight_ptr, y_ptr, R, H, G, W, x_stride, gate_stride, eps, GATE_FIRST: tl.constexpr,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, mask, _x, unit, _inverse_rms, gate, opening = _rows(
        x_ptr, gate_ptr, tl.program_id(0) * ROWS, R, H, G, W, x_stride, gate_stride, eps, GATE_FIRST, DTYPE, ROWS, BLOCK
    )
    col = tl.arange(0, BLOCK)
    y = unit * tl.load(weight_ptr + tl.program_id(1) * W + col, col < W, 0).to(DTYPE)[None, :]
    if not GATE_FIRST:
        y *= gate * opening
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _backward(
    grad_ptr, x_ptr, gate_ptr, weight_ptr, grad_x_ptr, grad_gate_ptr, grad_weight_ptr, R, H, G, W, x_stride,
    gate_stride, eps, GATE_FIRST: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + tl.program_id(1) * W + col, col < W, 0).to(DTYPE)[None, :]
    grad_weight = tl.zeros((ROWS, BLOCK), DTYPE)
    for first in range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS):
        place, mask, x, unit, inverse_rms, gate, opening = _rows(
            x_ptr, gate_ptr, first, R, H, G, W, x_stride, gate_stride, eps, GATE_FIRST, DTYPE, ROWS, BLOCK
        )
        grad = tl.load(grad_ptr + place, mask, 0).to(DTYPE)
        silu, slope = gate * opening, opening * (1 + gate * (1 - opening))
        of_norm = grad if GATE_FIRST else grad * silu
        grad_weight += of_norm * unit
        of_unit = of_norm * weight
        of_normed = (of_unit - unit * (tl.sum(of_unit * unit, 1) / W)[:, None]) * inverse_rms
        if GATE_FIRST:
            grad_x, grad_gate = of_normed * silu, of_normed * x * slope
        else:
            grad_x, grad_gate = of_normed, grad * unit * weight * slope
        tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask)
        tl.store(grad_gate_ptr + place, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask)
    part = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * W + col
    tl.store(grad_weight_ptr + part, tl.sum(grad_weight, 0), col < W)


def gated_norm(x_GW: Tensor, gate_GW: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    """See :func:`moeplan.kernels.gated_norm.gated_norm`; rows of at most MAX_WIDTH."""
    y_GW: Tensor = _GatedNorm.apply(x_GW, gate_GW, weight, eps, gate_first)
    return y_GW


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_GW: Tensor, gate_GW: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:  # noqa: FBT001 - autograd passes by position
        x_TGW, gate_TGW, weight_VW = _tokens(x_GW), _tokens(gate_GW), weight.contiguous().view(-1, weight.shape[-1])
        ctx.save_for_backward(x_TGW, gate_TGW, weight_VW)
        ctx.shapes, ctx.eps, ctx.gate_first = (x_GW.shape, weight.shape), eps, gate_first
        y_GW = torch.empty(x_GW.shape, dtype=x_GW.dtype, device=x_GW.device)
        sizes, rows, block = _sizes(x_TGW, gate_TGW, weight_VW)
        if sizes[0]:
            _forward[triton.cdiv(sizes[0], rows), len(weight_VW)](
                x_TGW, gate_TGW, weight_VW, y_GW, *sizes, eps, gate_first, compute_dtype(x_GW), rows, block
            )
        return y_GW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_GW: Tensor) -> tuple[Tensor | None, ...]:
        x_TGW, gate_TGW, weight_VW = ctx.saved_tensors
        shape, weight_shape = ctx.shapes
        grad_GW = grad_GW.contiguous()
        grad_x_GW, grad_gate_GW = torch.empty_like(grad_GW), torch.empty_like(grad_GW)
        sizes, rows, block = _sizes(x_TGW, gate_TGW, weight_VW)
        most = max(1, _PROGRAMS_A_PROCESSOR * num_processors(grad_GW.device) // len(weight_VW))
        num_programs = min(triton.cdiv(sizes[0], rows), most)
        sum_dtype = torch.promote_types(grad_GW.dtype, torch.float32)
        parts = grad_GW.new_empty((num_programs, *weight_VW.shape), dtype=sum_dtype)
        if num_programs:
            _backward[num_programs, len(weight_VW)](
                grad_GW, x_TGW, gate_TGW, weight_VW, grad_x_GW, grad_gate_GW, parts, *sizes, ctx.eps, ctx.gate_first,
                compute_dtype(grad_GW), rows, block,
            )  # fmt: skip
        grad_weight = parts.sum(0).to(weight_VW.dtype).view(weight_shape)
        return grad_x_GW.view(shape), grad_gate_GW.view(shape), grad_weight, None, None


def _tokens(x_GW: Tensor) -> Tensor:
    """[T, G, W] with whole heads side by side; a copy where they are not, or tokens are not equally far apart."""
    x_TGW = x_GW.flatten(0, -3)
    return x_TGW if x_TGW.stride()[1:] == (x_TGW.shape[2], 1) else x_TGW.contiguous()


def _sizes(x_TGW: Tensor, gate_TGW: Tensor, weight_VW: Tensor) -> tuple[tuple[int, ...], int, int]:
    """Numbers that both kernels take, and rows and columns of a program's block."""
    num_tokens, heads, width = x_TGW.shape
    a_weight, block = heads // len(weight_VW), int(triton.next_power_of_2(width))
    sizes = num_tokens * a_weight, a_weight, heads, width, x_TGW.stride(0), gate_TGW.stride(0)
    return sizes, max(1, _ELEMENTS_A_PROGRAM // block), block
