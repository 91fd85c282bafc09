"""Grouped GEMM by torch.nn.functional.grouped_mm. On CUDA the offsets stay on the device.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moeplan.kernels import grouped_gemm_reference
from moeplan.kernels.grouped_mm_limits import is_supported
from moeplan.kernels.grouped_weight_grad import add_grouped_weight_grad_
from moeplan.kernels.main_grad import main_grad_of
from moeplan.kernels.row_map import RowMap
from moeplan.kernels.weight_grad_queue import now_or_later


def grouped_gemm(x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor, copied: RowMap | None = None, /) -> Tensor:
    """y_TF = x times the weight of each row's expert; see :func:`moeplan.kernels.grouped_gemm.grouped_gemm`.

    Operands that grouped_mm does not take (fp64, or widths of broken 16-byte words) go through the reference.
    """
    if not is_supported(x_TH, weight_EHF) and main_grad_of(weight_EHF) is None:
        return grouped_gemm_reference.grouped_gemm(x_TH, weight_EHF, offsets_E)
    y_TF: Tensor = _GroupedGemm.apply(x_TH, weight_EHF, offsets_E, copied)
    return y_TF


class _GroupedGemm(torch.autograd.Function):
    """grouped_mm with its gradients. torch's own refuse a gradient with stride 0, such as that of a sum.

    That of the weight goes to its main gradient where it has one.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor, copied: RowMap | None) -> Tensor:
        x_TH = x_TH.contiguous()
        ctx.save_for_backward(x_TH, weight_EHF, offsets_E)
        ctx.main_grad, ctx.copied = main_grad_of(weight_EHF), copied
        return _product(x_TH, weight_EHF, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_TH, weight_EHF, offsets_E = ctx.saved_tensors
        grad_TF, main, copied = grad_TF.contiguous(), ctx.main_grad, ctx.copied
        grad_x_TH = grad_weight_EHF = None
        # First, so that what it needs for itself does not live beside the input's gradient.
        if ctx.needs_input_grad[1] and main is not None:
            now_or_later(lambda: add_grouped_weight_grad_(main, x_TH, grad_TF, offsets_E, copied=copied))
        elif ctx.needs_input_grad[1]:
            grad_weight_EHF = F.grouped_mm(x_TH.t(), grad_TF, offs=offsets_E)
        if ctx.needs_input_grad[0]:
            grad_x_TH = _product(grad_TF, weight_EHF.transpose(1, 2), offsets_E)
        return grad_x_TH, grad_weight_EHF, None, None


def _product(x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor) -> Tensor:
    if is_supported(x_TH, weight_EHF):
        return F.grouped_mm(x_TH, weight_EHF, offs=offsets_E)
    return grouped_gemm_reference.grouped_gemm(x_TH, weight_EHF, offsets_E)
