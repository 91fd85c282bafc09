"""RMS norm in one kernel each way: x and the gradient read once, the gradient of x written once.

The sums of the residual stream around it, of values before and of gradients behind, are of the same pass.

Backward runs a few programs a multiprocessor, each over many rows, and keeps its part of the weight's gradient in
registers; torch's own reads x and the gradient a second time for it.

Shapes: R rows (all leading dimensions), H width, P programs.
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

MAX_WIDTH = 8192  # of a row that a program holds at once; beyond it registers spill
_ELEMENTS_A_PROGRAM = 2048  # at least: narrow rows, such as those of heads, go several at a time
# Backward: 16 elements a thread take at most 96 registers, so that a Hopper multiprocessor runs 20 warps at once. More
# programs than fit would run after the others, with most of the multiprocessor idle.
_ELEMENTS_A_WARP = 512
_WARPS_A_PROCESSOR = 20


@triton.jit
def _norm(
    x_ptr,
    update_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    inverse_rms_ptr,
    R,
    H,
    eps,
    HAS_UPDATE: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < R)[:, None] & (col < H)
    place = row[:, None] * H + col
    x = tl.load(x_ptr + place, mask, 0).to(DTYPE)
    if HAS_UPDATE:  # rounded before it is normed: backward norms what is stored
        x_sum = (x + tl.load(update_ptr + place, mask, 0).to(DTYPE)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + place, x_sum, mask)
        x = x_sum.to(DTYPE)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / H + eps)
    weight = tl.load(weight_ptr + col, col < H, 0).to(DTYPE)
    tl.store(y_ptr + place, (x * inverse_rms[:, None] * weight).to(y_ptr.dtype.element_ty), mask)
    tl.store(inverse_rms_ptr + row, inverse_rms, row < R)


@triton.jit
def _norm_backward(
    grad_ptr,
    grad_sum_ptr,
    x_ptr,
    weight_ptr,
    inverse_rms_ptr,
    grad_x_ptr,
    grad_weight_ptr,
    R,
    H,
    HAS_SUM: tl.constexpr,
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
        if HAS_SUM:
            grad_x += tl.load(grad_sum_ptr + place, mask, 0).to(DTYPE)
        tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask)
    total = tl.sum(grad_weight, 0)
    cols = tl.arange(0, BLOCK)
    tl.store(grad_weight_ptr + tl.program_id(0).to(tl.int64) * H + cols, total, cols < H)


def residual_rms_norm(x_H: Tensor, update_H: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`moeplan.kernels.norm.residual_rms_norm`; rows of at most MAX_WIDTH."""
    return cast("tuple[Tensor, Tensor]", _RmsNorm.apply(x_H, update_H, weight_H, eps))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_H: Tensor, update_H: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.has_update = update_H is not None
        source_H, num_rows = x_H.contiguous(), x_H.numel() // x_H.shape[-1]
        y_H = torch.empty_like(source_H)
        sum_H = source_H if update_H is None else torch.empty_like(source_H)
        inverse_rms_R = torch.empty(num_rows, dtype=torch.promote_types(x_H.dtype, torch.float32), device=x_H.device)
        ctx.save_for_backward(sum_H, weight_H, inverse_rms_R)
        if num_rows:
            rows, block = _tile(x_H.shape[-1])
            _norm[triton.cdiv(num_rows, rows),](
                source_H, source_H if update_H is None else update_H.contiguous(), weight_H, sum_H, y_H, inverse_rms_R,
                num_rows, x_H.shape[-1], eps, ctx.has_update, compute_dtype(x_H), rows, block,
            )  # fmt: skip
        return x_H.view_as(x_H) if update_H is None else sum_H, y_H

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_sum_H: Tensor | None, grad_H: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if grad_H is None:
            return grad_sum_H, grad_sum_H if ctx.has_update else None, None, None
        sum_H, weight_H, inverse_rms_R = ctx.saved_tensors
        grad_H, width, num_rows = grad_H.contiguous(), sum_H.shape[-1], len(inverse_rms_R)
        grad_x_H = torch.empty_like(sum_H)
        rows, block = _tile(width)
        num_warps = rows * block // _ELEMENTS_A_WARP
        most = _WARPS_A_PROCESSOR // num_warps * num_processors(sum_H.device)
        num_programs = min(triton.cdiv(num_rows, rows), most)
        grad_weight_PH = torch.empty((num_programs, width), dtype=inverse_rms_R.dtype, device=sum_H.device)
        if num_programs:
            _norm_backward[num_programs,](
                grad_H, grad_H if grad_sum_H is None else grad_sum_H.contiguous(), sum_H, weight_H, inverse_rms_R,
                grad_x_H, grad_weight_PH, num_rows, width, grad_sum_H is not None, compute_dtype(sum_H), rows, block,
                num_warps=num_warps,
            )  # fmt: skip
        grad_weight_H = grad_weight_PH.sum(0).to(weight_H.dtype)
        return grad_x_H, grad_x_H if ctx.has_update else None, grad_weight_H, None


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a program's block."""
    block = int(triton.next_power_of_2(width))
    return max(1, _ELEMENTS_A_PROGRAM // block), block
