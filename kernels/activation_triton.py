"""Activations in one kernel each way: read the input once, write the output (or the gradient) once.

Computes in fp32 and rounds once, where the torch back end rounds after each of its steps.

Shapes: R rows, F width after the activation, G width before it: 2F (gate, then up) for gated kinds, else F.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moeplan.kernels.triton_launch import block_of, compute_dtype

_CODES = {"swiglu": 0, "geglu": 1, "gelu": 1, "squared_relu": 2, "clamped_swiglu": 3}
_GATED = ("swiglu", "clamped_swiglu", "geglu")


def activation(x_RG: Tensor, kind: str, probs_R: Tensor | None = None) -> Tensor:
    """y_RF; see :func:`moeplan.kernels.activation.activation`."""
    if kind not in _CODES:
        raise ValueError(f"unknown activation {kind!r}; known: {', '.join(_CODES)}")
    y: Tensor = _Activation.apply(x_RG, probs_R, kind)
    return y


@triton.jit
def _exp_of_minus(x):
    """exp(-x), to be added to 1: it loses what is below the normal numbers, and so takes 4 instructions of 16 less."""
    return tl.exp2(x * -1.4426950408889634)  # log2(e)


@triton.jit
def _act(
    x,
    CODE: tl.constexpr,
):
    if CODE == 0:
        return x / (1 + _exp_of_minus(x))
    if CODE == 1:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    if CODE == 3:
        clamped = tl.minimum(x, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return clamped / (1 + _exp_of_minus(1.702 * clamped))
    return tl.where(x <= 0, 0.0, x * x)  # of what is no number neither side of 0 holds: it stays none


@triton.jit
def _act_slope(
    x,
    CODE: tl.constexpr,
):
    if CODE == 0:
        sigmoid = 1 / (1 + _exp_of_minus(x))
        return sigmoid * (1 + x * (1 - sigmoid))
    if CODE == 1:
        # 0.3989... is 1 / sqrt(2 pi).
        return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    if CODE == 3:
        clamped = tl.minimum(x, 7.0, propagate_nan=tl.PropagateNan.ALL)
        sigmoid = 1 / (1 + _exp_of_minus(1.702 * clamped))
        return tl.where(x > 7.0, 0.0, sigmoid * (1 + 1.702 * clamped * (1 - sigmoid)))
    return tl.where(x <= 0, 0.0, 2 * x)


@triton.jit
def _up(
    x,
    CODE: tl.constexpr,
):
    if CODE == 3:
        above = tl.maximum(x, -7.0, propagate_nan=tl.PropagateNan.ALL)
        return tl.minimum(above, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1
    return x


@triton.jit
def _forward(
    x_ptr,
    probs_ptr,
    y_ptr,
    F,
    CODE: tl.constexpr,
    GATED: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * F * (2 if GATED else 1)
    for start in range(0, F, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < F
        y = _act(tl.load(x_row + cols, mask, 0).to(DTYPE), CODE)
        if GATED:
            y *= _up(tl.load(x_row + F + cols, mask, 0).to(DTYPE), CODE)
        if HAS_PROBS:
            y *= tl.load(probs_ptr + row).to(DTYPE)
        tl.store(y_ptr + row * F + cols, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _backward(
    grad_ptr,
    x_ptr,
    probs_ptr,
    grad_x_ptr,
    grad_probs_ptr,
    F,
    CODE: tl.constexpr,
    GATED: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = row * F * (2 if GATED else 1)
    grad_prob = tl.zeros((BLOCK,), DTYPE)
    for start in range(0, F, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < F
        gate = tl.load(x_ptr + first + cols, mask, 0).to(DTYPE)
        grad = tl.load(grad_ptr + row * F + cols, mask, 0).to(DTYPE)
        act = _act(gate, CODE)
        weighted = grad
        if HAS_PROBS:
            weighted = grad * tl.load(probs_ptr + row).to(DTYPE)
        if GATED:
            up = tl.load(x_ptr + first + F + cols, mask, 0).to(DTYPE)
            grad_up = weighted * act
            if CODE == 3:
                grad_up = tl.where(tl.abs(up) > 7.0, 0.0, grad_up)
            tl.store(grad_x_ptr + first + F + cols, grad_up.to(grad_x_ptr.dtype.element_ty), mask)
            up = _up(up, CODE)
            weighted *= up
            act *= up
        grad_gate = weighted * _act_slope(gate, CODE)
        tl.store(grad_x_ptr + first + cols, grad_gate.to(grad_x_ptr.dtype.element_ty), mask)
        grad_prob += grad * act
    if HAS_PROBS:
        tl.store(grad_probs_ptr + row, tl.sum(grad_prob, 0).to(grad_probs_ptr.dtype.element_ty))


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RG: Tensor, probs_R: Tensor | None, kind: str) -> Tensor:
        x_RG = x_RG.contiguous()
        gated = kind in _GATED
        width = x_RG.shape[-1] // (2 if gated else 1)
        y_RF = x_RG.new_empty((*x_RG.shape[:-1], width))
        probs_R = None if probs_R is None else probs_R.contiguous()
        ctx.kind, ctx.width = kind, width
        ctx.save_for_backward(x_RG, probs_R)
        if y_RF.numel():
            _forward[y_RF.numel() // width,](
                x_RG, probs_R if probs_R is not None else x_RG, y_RF, width, _CODES[kind], gated,
                probs_R is not None, compute_dtype(x_RG), block_of(width),
            )  # fmt: skip
        return y_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_RG, probs_R = ctx.saved_tensors
        grad_RF = grad_RF.contiguous()
        grad_x_RG = torch.empty_like(x_RG)
        grad_probs_R = None if probs_R is None else torch.empty_like(probs_R)
        if grad_RF.numel():
            _backward[grad_RF.numel() // ctx.width,](
                grad_RF, x_RG, probs_R if probs_R is not None else x_RG, grad_x_RG,
                grad_probs_R if grad_probs_R is not None else grad_x_RG, ctx.width, _CODES[ctx.kind],
                ctx.kind in _GATED, probs_R is not None, compute_dtype(x_RG), block_of(ctx.width),
            )  # fmt: skip
        return grad_x_RG, grad_probs_R, None
