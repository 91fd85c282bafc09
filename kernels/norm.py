"""RMS norm.

Shapes: ... any leading dimensions, H width.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def rms_norm(x_H: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension in the dtype of x: x / sqrt(mean(x**2) + eps) * weight.

    Keeps x and one number a row for backward. On CUDA rows of up to 8192 have a kernel of their own, because torch's
    backward reads both operands twice; on a CPU torch's is a chain of twenty operations that keeps three tensors.
    """
    return residual_rms_norm(x_H, None, weight_H, eps)[1]


def residual_rms_norm(x_H: Tensor, update_H: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream x + update (x where there is no update) and its :func:`rms_norm`, in the dtype of x.

    One pass each way: forward norms the sum that it writes, and backward adds the gradient of the stream to that of the
    norm's input, so that whoever goes on with the stream that is returned costs no further addition. Keeps the sum and
    one number a row.
    """
    if x_H.is_cuda:
        from moeplan.kernels import norm_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

        if x_H.shape[-1] <= norm_triton.MAX_WIDTH:
            return norm_triton.residual_rms_norm(x_H, update_H, weight_H, eps)
        sum_H = x_H if update_H is None else x_H + update_H
        return sum_H, F.rms_norm(sum_H, weight_H.shape, weight_H, eps)
    return cast("tuple[Tensor, Tensor]", _RmsNorm.apply(x_H, update_H, weight_H, eps))


def rms_norm_reference(x_H: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """:func:`rms_norm` in plain autograd: any device and dtype."""
    return x_H * torch.rsqrt(x_H.square().mean(-1, keepdim=True) + eps) * weight_H


class _RmsNorm(torch.autograd.Function):
    """With r = 1/rms and n = x r: dx = r (w dy - n mean(n w dy)), dw = sum(dy n) over rows."""

    @staticmethod
    def forward(ctx: Any, x_H: Tensor, update_H: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.has_update = update_H is not None
        sum_H = x_H.view_as(x_H) if update_H is None else x_H + update_H
        inverse_rms_1 = torch.linalg.vector_norm(sum_H, dim=-1, keepdim=True, dtype=_accumulate_dtype(x_H))
        inverse_rms_1 = inverse_rms_1.square_().div_(x_H.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_H if update_H is None else sum_H, weight_H, inverse_rms_1)
        return sum_H, (sum_H * inverse_rms_1).mul_(weight_H).to(x_H.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_sum_H: Tensor | None, grad_H: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if grad_H is None:
            return grad_sum_H, grad_sum_H if ctx.has_update else None, None, None
        x_H, weight_H, inverse_rms_1 = ctx.saved_tensors
        unit_H = x_H * inverse_rms_1
        grad_weight_H = (grad_H * unit_H).flatten(0, -2).sum(0).to(weight_H.dtype)
        weighted_H = grad_H * weight_H
        mean_1 = torch.linalg.vecdot(weighted_H.to(unit_H.dtype), unit_H).div_(x_H.shape[-1])
        grad_x_H = (weighted_H - unit_H.mul_(mean_1[..., None])).mul_(inverse_rms_1)
        if grad_sum_H is not None:
            grad_x_H += grad_sum_H
        grad_x_H = grad_x_H.to(x_H.dtype)
        return grad_x_H, grad_x_H if ctx.has_update else None, grad_weight_H, None


def _accumulate_dtype(x_H: Tensor) -> torch.dtype:
    return torch.promote_types(x_H.dtype, torch.float32)
