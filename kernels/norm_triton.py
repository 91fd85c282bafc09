"""RMS norm in one kernel each way: x and the gradient read once, the gradient of x written once.

Backward runs a few programs a multiprocessor, each over many rows, and keeps its part of the weight's gradient in
registers; torch's own reads x and the gradient a second time for it.

Shapes: R rows (all leading dimensions), H width, P programs.
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

MAX_WIDTH = 8192  # of a row that a program holds at once; beyond it registers spill
_ELEMENTS_A_PROGRAM = 2048  # at least: narrow rows, such as those of heads, go several at a time
_PROGRAMS_A_PROCESSOR = 8


@triton.jit
def _norm(
    x_ptr,
    weight_ptr,
    y_ptr,
    inverse_rms_ptr,
    R,
    H,
    eps,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < R)[:, None] & (col < H)
    place = row[:, None] * H + col
    x = tl.load(x_ptr + place, mask, 0).to(DTYPE)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / H + eps)
    weight = tl.load(weight_ptr + col, col < H, 0).to(DTYPE)
    tl.store(y_ptr + place, (x * inverse_rms[:, None] * weight).to(y_ptr.dtype.element_ty), mask)
    tl.store(inverse_rms_ptr + row, inverse_rms, row < R)


@triton.jit
def _norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    inverse_rms_ptr,
    grad_x_ptr,
    grad_weight_ptr,
    R,
    H,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    col = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + col, col < H, 0).to(DTYPE)
    grad_weight = tl.zeros((ROWS, BLOCK), DTYPE)
    for first in range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < R)[:, None] & (col < H)
        place = row[:, None] * H + col
        x = tl.load(x_ptr + place, mask, 0).to(DTYPE)
        grad = tl.load(grad_ptr + place, mask, 0).to(DTYPE)
        inverse_rms = tl.load(inverse_rms_ptr + row, row < R, 0)[:, None]
        unit = x * inverse_rms
        grad_weight += grad * unit
        weighted = grad * weight
        grad_x = (weighted - unit * (tl.sum(weighted * unit, 1) / H)[:, None]) * inverse_rms
        tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask)
    total = tl.sum(grad_weight, 0)
    cols = tl.arange(0, BLOCK)
    tl.store(grad_weight_ptr + tl.program_id(0).to(tl.int64) * H + cols, total, cols < H)


def rms_norm(x_H: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """See :func:`moeplan.kernels.norm.rms_norm`; rows of at most MAX_WIDTH."""
    y_H: Tensor = _RmsNorm.apply(x_H, weight_H, eps)
    return y_H


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_H: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x_H = x_H.contiguous()
        y_H, num_rows = torch.empty_like(x_H), x_H.numel() // x_H.shape[-1]
        inverse_rms_R = torch.empty(num_rows, dtype=torch.promote_types(x_H.dtype, torch.float32), device=x_H.device)
        ctx.save_for_backward(x_H, weight_H, inverse_rms_R)
        if num_rows:
            rows, block = _tile(x_H.shape[-1])
            _norm[triton.cdiv(num_rows, rows),](
                x_H, weight_H, y_H, inverse_rms_R, num_rows, x_H.shape[-1], eps, compute_dtype(x_H), rows, block
            )
        return y_H

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_H: Tensor) -> tuple[Tensor, Tensor, None]:
        x_H, weight_H, inverse_rms_R = ctx.saved_tensors
        grad_H, width, num_rows = grad_H.contiguous(), x_H.shape[-1], len(inverse_rms_R)
        grad_x_H = torch.empty_like(x_H)
        rows, block = _tile(width)
        num_programs = min(triton.cdiv(num_rows, rows), _PROGRAMS_A_PROCESSOR * num_processors(x_H.device))
        grad_weight_PH = torch.empty((num_programs, width), dtype=inverse_rms_R.dtype, device=x_H.device)
        if num_programs:
            _norm_backward[num_programs,](
                grad_H, x_H, weight_H, inverse_rms_R, grad_x_H, grad_weight_PH, num_rows, width,
                compute_dtype(x_H), rows, block,
            )  # fmt: skip
        return grad_x_H, grad_weight_PH.sum(0).to(weight_H.dtype), None


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a program's block."""
    block = int(triton.next_power_of_2(width))
    return max(1, _ELEMENTS_A_PROGRAM // block), block
