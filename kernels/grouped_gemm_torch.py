"""Grouped GEMM by torch.nn.functional.grouped_mm. On CUDA the offsets stay on the device.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moeplan.kernels import grouped_gemm_reference

# Rows of every operand must start at a multiple of this (torch 2.13: "strides should be multiple of 16 bytes").
ALIGNMENT_BYTES = 16


def is_supported(x_TH: Tensor, weight_EHF: Tensor) -> bool:
    """Whether grouped_mm takes these operands, in forward and in both gradients: the only statement of its limits.

    torch 2.13: bf16 on CUDA (other dtypes there run a loop that waits for the host); bf16, fp16 and fp32 on CPU; H and
    F of whole 16-byte words.
    """
    dtypes = (torch.bfloat16,) if x_TH.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    widths_bytes = (width * x_TH.element_size() for width in weight_EHF.shape[1:])
    return x_TH.dtype in dtypes and all(width_bytes % ALIGNMENT_BYTES == 0 for width_bytes in widths_bytes)


def grouped_gemm(x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor) -> Tensor:
    """y_TF = x times the weight of each row's expert; see :func:`moeplan.kernels.grouped_gemm.grouped_gemm`.

    Operands that grouped_mm does not take (fp64, or widths of broken 16-byte words) go through the reference.
    """
    if not is_supported(x_TH, weight_EHF):
        return grouped_gemm_reference.grouped_gemm(x_TH, weight_EHF, offsets_E)
    y_TF: Tensor = _GroupedGemm.apply(x_TH, weight_EHF, offsets_E)
    return y_TF


class _GroupedGemm(torch.autograd.Function):
    """grouped_mm with its gradients. torch's own refuse a gradient with stride 0, such as that of a sum."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor) -> Tensor:
        x_TH = x_TH.contiguous()
        ctx.save_for_backward(x_TH, weight_EHF, offsets_E)
        return F.grouped_mm(x_TH, weight_EHF, offs=offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TH, weight_EHF, offsets_E = ctx.saved_tensors
        grad_TF = grad_TF.contiguous()
        grad_x_TH = grad_weight_EHF = None
        if ctx.needs_input_grad[0]:
            grad_x_TH = F.grouped_mm(grad_TF, weight_EHF.transpose(1, 2), offs=offsets_E)
        if ctx.needs_input_grad[1]:
            grad_weight_EHF = F.grouped_mm(x_TH.t(), grad_TF, offs=offsets_E)
        return grad_x_TH, grad_weight_EHF, None
