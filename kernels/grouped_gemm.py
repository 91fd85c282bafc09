"""Grouped GEMM: each expert's rows times that expert's weight, in one call.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from moeplan.kernels import grouped_gemm_by_expert, grouped_gemm_quack, grouped_gemm_reference, grouped_gemm_torch
from moeplan.kernels.back_end_choice import Shape, chosen
from moeplan.kernels.grouped_mm_limits import is_supported
from moeplan.kernels.grouped_weight_grad import OPERATION as WEIGHT_GRAD
from moeplan.kernels.grouped_weight_grad import add_grouped_weight_grad_, add_parts_
from moeplan.kernels.host_offsets import start_host_copy
from moeplan.kernels.main_grad import MainGrad, main_grad_of
from moeplan.kernels.row_map import RowMap
from moeplan.kernels.weight_grad_pairs import Operands
from moeplan.kernels.weight_grad_queue import now_or_later

OPERATION = "grouped_gemm"  # forward
INPUT_GRAD = "grouped_input_grad"  # the same product with the weights transposed; both by shape of the weights
REFERENCE = "reference"


class GroupedProduct(Protocol):
    """A back end: y_TF with y[t] = x[t] @ weight[e], without gradients. Either dimension of a weight may be inner."""

    def __call__(self, x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor, /) -> Tensor: ...


PRODUCTS: dict[str, GroupedProduct] = {
    "torch": grouped_gemm_torch.product,
    "by_expert": grouped_gemm_by_expert.product,
    **{name: partial(grouped_gemm_quack.product, name) for name in grouped_gemm_quack.TILES},
}
BACKENDS = (REFERENCE, *PRODUCTS)


def grouped_gemm(
    x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor, *, copied: RowMap | None = None, backend: str | None = None
) -> Tensor:
    """y_TF with y[t] = x[t] @ weight[e] for the rows t of expert e, with gradients for x and weight.

    ``offsets_E`` (int32, on the device of x) holds where the rows of each expert end: those of expert e run from
    ``offsets[e - 1]`` to ``offsets[e]``, an empty expert repeats its predecessor, and the last offset must be T. x and
    weight share a dtype. ``copied``: the map by which rows of x are copies of tokens, which then may wait in place of
    rows. ``backend``: of both products; without it the ones chosen for this shape, else torch's. KeyError for an
    unknown one. Operands that torch's does not take go through the reference.
    """
    shape: Shape = tuple(weight_EHF.shape)
    forward = backend or chosen(OPERATION, shape) or "torch"
    input_grad = backend or chosen(INPUT_GRAD, shape) or "torch"
    is_left_out = forward == "torch" and not is_supported(x_TH, weight_EHF) and main_grad_of(weight_EHF) is None
    if forward == REFERENCE or is_left_out:
        return grouped_gemm_reference.grouped_gemm(x_TH, weight_EHF, offsets_E)
    if "by_expert" in {input_grad, chosen(WEIGHT_GRAD, shape)}:
        start_host_copy(offsets_E)  # backward then need not wait for what runs before it
    call = _Call(PRODUCTS[forward], PRODUCTS[input_grad], copied)
    y_TF: Tensor = _GroupedGemm.apply(x_TH, weight_EHF, offsets_E, call)
    return y_TF


@dataclass(frozen=True, slots=True)
class _Call:
    """What is no tensor: back ends of both products, and how rows of the input were made."""

    forward: GroupedProduct
    input_grad: GroupedProduct
    copied: RowMap | None


class _GroupedGemm(torch.autograd.Function):
    """A product with its gradients; that of the weight goes to its main gradient where it has one.

    Gradients of stride 0, such as that of a sum, are made whole: no back end takes them.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor, call: _Call) -> Tensor:
        x_TH = x_TH.contiguous()
        ctx.save_for_backward(x_TH, weight_EHF)
        ctx.offsets_E = offsets_E  # itself, with what is known of it: unpacked it may be another object
        ctx.main_grad, ctx.call = main_grad_of(weight_EHF), call
        return call.forward(x_TH, weight_EHF.detach(), offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weight_EHF = ctx.saved_tensors
        grad_TF, offsets_E, main, call = grad_TF.contiguous(), ctx.offsets_E, ctx.main_grad, ctx.call
        grad_x_TH = grad_weight_EHF = None
        # First, so that what it needs for itself does not live beside the input's gradient.
        if ctx.needs_input_grad[1] and main is not None:
            now_or_later(lambda: add_grouped_weight_grad_(main, x_TH, grad_TF, offsets_E, copied=call.copied))
        elif ctx.needs_input_grad[1]:
            grad_weight_EHF = _weight_grad(x_TH, grad_TF, offsets_E, weight_EHF)
        if ctx.needs_input_grad[0]:
            grad_x_TH = call.input_grad(grad_TF, weight_EHF.transpose(1, 2), offsets_E)
        return grad_x_TH, grad_weight_EHF, None, None


def _weight_grad(x_TH: Tensor, grad_TF: Tensor, offsets_E: Tensor, weight_EHF: Tensor) -> Tensor:
    """Of the dtype of the weight, for autograd."""
    if is_supported(x_TH, weight_EHF):
        return functional.grouped_mm(x_TH.t(), grad_TF, offs=offsets_E)
    main = MainGrad(torch.empty_like(weight_EHF))
    add_parts_(main, (Operands(x_TH, grad_TF, offsets_E),), backend="by_expert")
    return main.total
