"""Matrices split over tensor-parallel ranks, with the activations between them split along tokens.

Shapes: T tokens of the group, L = T / tp tokens of this rank, I input width, O output width (of this rank).
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from moeplan.executor.collectives import all_gather_raw, reduce_scatter_raw, scatter_rows
from moeplan.executor.mesh import Group
from moeplan.executor.quantized import quantized_linear, quantized_of
from moeplan.executor.scopes import scope
from moeplan.kernels.embedding import add_rows_
from moeplan.kernels.main_grad import MainGrad, main_grad_of
from moeplan.kernels.weight_grad import add_weight_grad_
from moeplan.kernels.weight_grad_queue import now_or_later


def weight_gradient(main: MainGrad | None, grad_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    """What backward hands to autograd for the weight: nothing where ``main`` takes its gradient [O, I]."""
    if main is None:
        with scope("dense_gemm"):
            return grad_TO.t() @ x_TI

    def add() -> None:
        with scope("dense_gemm"):
            add_weight_grad_(main, grad_TO, x_TI)

    now_or_later(add)
    return None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_LI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.has_bias, ctx.main_grad = bias_O is not None, main_grad_of(weight_OI)
        ctx.save_for_backward(x_LI, weight_OI)
        return F.linear(x_LI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_LI, weight_OI = ctx.saved_tensors
        (grad_LO,) = grads
        with scope("dense_gemm"):
            grad_LI = grad_LO @ weight_OI if ctx.needs_input_grad[0] else None
            grad_bias_O = grad_LO.sum(0) if ctx.has_bias else None
        grad_OI = weight_gradient(ctx.main_grad, grad_LO, x_LI) if ctx.needs_input_grad[1] else None
        return grad_LI, grad_OI, grad_bias_O


class _ColumnLinear(Function):
    """Keeps the tokens of this rank and gathers the others again in backward, so that 1/tp of the input is saved."""

    @staticmethod
    def forward(ctx: Any, x_LI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, group: Group) -> Tensor:
        ctx.group, ctx.has_bias, ctx.main_grad = group, bias_O is not None, main_grad_of(weight_OI)
        ctx.save_for_backward(x_LI, weight_OI)
        with scope("tp_comm"):
            x_TI = all_gather_raw(x_LI, group)
        with scope("dense_gemm"):
            return F.linear(x_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_LI, weight_OI = ctx.saved_tensors
        (grad_TO,) = grads
        with scope("dense_gemm"):
            partial_TI = grad_TO @ weight_OI
        with scope("tp_comm"):
            grad_LI = reduce_scatter_raw(partial_TI, ctx.group)
            x_TI = all_gather_raw(x_LI, ctx.group)
        grad_OI = weight_gradient(ctx.main_grad, grad_TO, x_TI)
        with scope("dense_gemm"):
            grad_bias_O = grad_TO.sum(0) if ctx.has_bias else None
        return grad_LI, grad_OI, grad_bias_O, None


def column_linear(x_LI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, group: Group) -> Tensor:
    """y_TO: every token of the group times this rank's rows of the weight."""
    if quantized_of(weight_OI) is not None:
        return quantized_linear(x_LI, weight_OI, bias_O, group)
    if group.size == 1:
        return local_linear(x_LI, weight_OI, bias_O)
    return cast("Tensor", _ColumnLinear.apply(x_LI, weight_OI, bias_O, group))


def row_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, group: Group) -> Tensor:
    """y_LO: this rank's tokens of the sum over the group of x times this rank's columns of the weight."""
    y_LO = scatter_rows(local_linear(x_TI, weight_OI, None), group)
    return y_LO if bias_O is None else y_LO + bias_O


def local_linear(x_LI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Tokens [L, I] times a weight that needs no communication."""
    if quantized_of(weight_OI) is not None:
        return quantized_linear(x_LI, weight_OI, bias_O)
    with scope("dense_gemm"):
        return cast("Tensor", _Linear.apply(x_LI, weight_OI, bias_O))


class _LookUp(Function):
    """Rows of a weight that has a main gradient; zeros, with no gradient, where the row is -1."""

    @staticmethod
    def forward(ctx: Any, row_T: Tensor, weight_VH: Tensor, main: MainGrad, has_gaps: bool) -> Tensor:  # noqa: FBT001 - autograd passes by position
        ctx.main_grad = main
        ctx.save_for_backward(row_T)
        if not has_gaps:
            return F.embedding(row_T, weight_VH)
        return F.embedding(row_T.clamp(min=0), weight_VH).mul_((row_T >= 0)[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (row_T,) = ctx.saved_tensors
        with scope("elementwise"):
            add_rows_(ctx.main_grad, grads[0], row_T)
        return None, None, None, None


def embed(tokens_T: Tensor, weight_VH: Tensor, first_token: int, group: Group) -> Tensor:
    """x_LH: embeddings of this rank's tokens, looked up where the rows are and summed over the group.

    On CUDA the gradient of the weight goes to its main gradient row by row, where it has one.
    """
    main = main_grad_of(weight_VH) if weight_VH.is_cuda else None
    with scope("elementwise"):
        if group.size == 1:
            return F.embedding(tokens_T, weight_VH) if main is None else look_up(tokens_T, weight_VH, main)
        local_T = tokens_T - first_token
        is_here_T = (local_T >= 0) & (local_T < weight_VH.shape[0])
        if main is None:
            partial_TH = F.embedding(torch.where(is_here_T, local_T, 0), weight_VH) * is_here_T[:, None]
        else:
            partial_TH = look_up(torch.where(is_here_T, local_T, -1), weight_VH, main, has_gaps=True)
    return scatter_rows(partial_TH, group)


def look_up(row_T: Tensor, weight_VH: Tensor, main: MainGrad, *, has_gaps: bool = False) -> Tensor:
    """x_TH: rows of the weight, whose gradient backward adds to ``main``; under ``has_gaps`` zeros for each row -1."""
    return cast("Tensor", _LookUp.apply(row_T, weight_VH, main, has_gaps))
