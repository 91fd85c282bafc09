"""Grouped GEMM as one GEMM of the dense library an expert: fastest where experts are few and large.

One H200, 8 experts of 4096 rows, 4096 x 28,672: cuBLAS 673 and 691 TFLOP/s forward and for the input's gradient,
grouped_mm 638 and 664. The host needs to know the offsets: it waits for them once a forward, when nothing else does.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moeplan.kernels.grouped_weight_grad import add_grouped_weight_grad_
from moeplan.kernels.host_offsets import host_offsets
from moeplan.kernels.main_grad import MainGrad, main_grad_of
from moeplan.kernels.row_map import RowMap
from moeplan.kernels.weight_grad_queue import now_or_later


def grouped_gemm(x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor, copied: RowMap | None = None, /) -> Tensor:
    """y_TF = x times the weight of each row's expert; see :func:`moeplan.kernels.grouped_gemm.grouped_gemm`."""
    y_TF: Tensor = _ByExpert.apply(x_TH, weight_EHF, offsets_E, copied)
    return y_TF


def _products(x_TH: Tensor, weight_EHF: Tensor, ends: tuple[int, ...]) -> Tensor:
    y_TF = x_TH.new_empty((x_TH.shape[0], weight_EHF.shape[2]))
    for (start, end), weight_HF in zip(pairwise((0, *ends)), weight_EHF.unbind(), strict=True):
        if end > start:
            torch.mm(x_TH[start:end], weight_HF, out=y_TF[start:end])
    return y_TF


class _ByExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor, copied: RowMap | None) -> Tensor:
        x_TH = x_TH.contiguous()
        ctx.save_for_backward(x_TH, weight_EHF, offsets_E)
        ctx.main_grad, ctx.ends, ctx.copied = main_grad_of(weight_EHF), host_offsets(offsets_E), copied
        return _products(x_TH, weight_EHF.detach(), ctx.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_TH, weight_EHF, offsets_E = ctx.saved_tensors
        grad_TF, main, copied = grad_TF.contiguous(), ctx.main_grad, ctx.copied
        grad_x_TH = grad_weight_EHF = None
        if ctx.needs_input_grad[1] and main is not None:
            now_or_later(lambda: add_grouped_weight_grad_(main, x_TH, grad_TF, offsets_E, copied=copied))
        elif ctx.needs_input_grad[1]:
            whole = MainGrad(torch.empty_like(weight_EHF))
            add_grouped_weight_grad_(whole, x_TH, grad_TF, offsets_E, backend="by_expert")
            grad_weight_EHF = whole.total
        if ctx.needs_input_grad[0]:
            grad_x_TH = _products(grad_TF, weight_EHF.transpose(1, 2), ctx.ends)
        return grad_x_TH, grad_weight_EHF, None, None
