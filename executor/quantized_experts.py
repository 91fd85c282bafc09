"""The experts' MLP in FP8 as one function: what one GEMM writes, the next pass reads once and leaves in FP8.

Between the two grouped GEMMs the activation is quantized as it is computed, and in backward the gradient of its input;
neither the activation nor that gradient exists in bf16. Kept for backward: rows and activation in FP8, turned, and the
first GEMM's output, from which ``moe_act`` recompute makes the activation again.

Where the experts get tokens and the map that sorts their copies, those are quantized while they are copied, in backward
the gradients of sums as well: copies in bf16, 4 KiB each way and token of 2048 for each of its experts, never exist.

Shapes: R rows sorted by expert, T tokens, K experts a token, H hidden, G width before the activation, F after it, E
experts.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moeplan.executor.quantized import QuantizedWeight, quantize_operand, quantized_of, weight_gradient
from moeplan.executor.scopes import scope
from moeplan.kernels.main_grad import main_grad_of
from moeplan.kernels.padded_rows import PaddedRows, padded_rows
from moeplan.kernels.permute import unpermute
from moeplan.kernels.quantized_gemm import Pair, Stored, backend_of
from moeplan.kernels.row_map import RowMap

KINDS = ("swiglu", "geglu", "gelu", "squared_relu")


def is_fused(in_weight_EHG: Tensor, out_weight_EFH: Tensor, kind: str) -> bool:
    """Whether :func:`quantized_experts` takes these weights: FP8 whose scale is not one of the step before."""
    both = (quantized_of(in_weight_EHG), quantized_of(out_weight_EFH))
    if kind not in KINDS or any(one is None or one.recipe.is_delayed for one in both):
        return False
    weights = (in_weight_EHG, out_weight_EFH)
    return all(
        one is not None and backend_of(one.recipe_name, weight) == "triton"
        for one, weight in zip(both, weights, strict=True)
    )


def quantized_experts(
    rows_RH: Tensor,
    probs_R: Tensor | None,
    offsets_E: Tensor,
    weights: tuple[Tensor, Tensor],
    kind: str,
) -> Tensor:
    """y_RH = act(rows @ weights[0]) * probs @ weights[1], for rows whose experts end at ``offsets_E``."""
    y_RH = _QuantizedExperts.apply(rows_RH, probs_R, offsets_E, *weights, kind, None)
    return cast("Tensor", y_RH)


def quantized_experts_of_tokens(
    x_TH: Tensor, probs_R: Tensor, rows: RowMap, weights: tuple[Tensor, Tensor], kind: str
) -> Tensor:
    """y_TH: the sum of :func:`quantized_experts` over each token's copies, which ``rows``, without gaps, sorts."""
    y_TH = _QuantizedExperts.apply(x_TH, probs_R, rows.offsets_E, *weights, kind, rows)
    return cast("Tensor", y_TH)


def _weight(parameter: Tensor) -> QuantizedWeight:
    quantized = quantized_of(parameter)
    assert quantized is not None
    return quantized


def _multiply(x: Stored, parameter: Tensor, rows: PaddedRows, *, is_forward: bool) -> Tensor:
    weight = _weight(parameter)
    copy = weight.forward_copy(parameter) if is_forward else weight.backward_copy(parameter)
    with scope("expert_gemm"):
        return weight.backend(parameter).multiply(x, copy, rows, weight.recipe, is_gradient=not is_forward)


def _summed(y_RH: Tensor, copied: RowMap | None) -> Tensor:
    if copied is None:
        return y_RH
    with scope("permute"):
        return unpermute(y_RH, copied)


def _activated(hidden_RG: Tensor, kind: str, probs_R: Tensor | None, rows: PaddedRows, weight: QuantizedWeight) -> Pair:
    from moeplan.kernels.activation_fp8_triton import activate  # noqa: PLC0415 - loads a compiler no CPU process needs

    blockwise = weight.recipe.scaling.block is not None
    with scope("elementwise"):
        return activate(hidden_RG, kind, probs_R, rows, torch.float8_e4m3fn, blockwise=blockwise)


def _activation_gradient(
    grad_RF: Tensor, hidden_RG: Tensor, kind: str, probs_R: Tensor | None, *, rows: PaddedRows, weight: QuantizedWeight
) -> tuple[Pair, Tensor | None]:
    from moeplan.kernels.activation_fp8_triton import activate_backward  # noqa: PLC0415 - as above

    blockwise = weight.recipe.scaling.block is not None
    dtype = torch.float8_e5m2 if weight.recipe.grad_element == "e5m2" else torch.float8_e4m3fn
    with scope("elementwise"):
        return activate_backward(grad_RF, hidden_RG, kind, probs_R, rows, dtype, blockwise=blockwise)


class _QuantizedExperts(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, x_H: Tensor, probs_R: Tensor | None, offsets_E: Tensor, in_weight: Tensor, out_weight: Tensor,
        kind: str, copied: RowMap | None,
    ) -> Tensor:  # fmt: skip
        first, second = _weight(in_weight), _weight(out_weight)
        rows = padded_rows(offsets_E, len(x_H if copied is None else copied.slot_of_row_R))
        probs_R = None if probs_R is None else probs_R.contiguous()
        x = quantize_operand(first, in_weight, x_H, rows, is_gradient=False, copied=copied)
        hidden_RG = _multiply(x.as_is, in_weight, rows, is_forward=True)
        activation = _activated(hidden_RG, kind, probs_R, rows, second)
        ctx.rows, ctx.kind, ctx.copied = rows, kind, copied
        ctx.main_grads = main_grad_of(in_weight), main_grad_of(out_weight)
        kept = () if second.keeps_input else activation.turned
        ctx.weights = in_weight, out_weight  # themselves: what is known of a weight is lost where others keep it
        ctx.save_for_backward(probs_R, hidden_RG, *x.turned, *kept)
        return _summed(_multiply(activation.as_is, out_weight, rows, is_forward=True), copied)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_H: Tensor) -> tuple[Tensor | None, ...]:
        probs_R, hidden_RG, *kept = ctx.saved_tensors
        in_weight, out_weight = ctx.weights
        rows, kind, copied = ctx.rows, ctx.kind, ctx.copied
        first, second = _weight(in_weight), _weight(out_weight)
        x, activation = cast("Stored", tuple(kept[:3])), cast("Stored", tuple(kept[3:]))
        # Whole, or it would be made so for its magnitude and once more to be quantized.
        grad = quantize_operand(second, out_weight, grad_H.contiguous(), rows, is_gradient=True, copied=copied)
        grad_RF = _multiply(grad.as_is, out_weight, rows, is_forward=False)
        if second.keeps_input:
            activation = _activated(hidden_RG, kind, probs_R, rows, second).turned
        grad_out = weight_gradient(second, out_weight, ctx.main_grads[1], x=activation, grad=grad.turned, rows=rows)
        grad_hidden, grad_probs_R = _activation_gradient(grad_RF, hidden_RG, kind, probs_R, rows=rows, weight=first)
        del grad_RF, grad, activation
        grad_x_H = _summed(_multiply(grad_hidden.as_is, in_weight, rows, is_forward=False), copied)
        grad_in = weight_gradient(first, in_weight, ctx.main_grads[0], x=x, grad=grad_hidden.turned, rows=rows)
        return grad_x_H, grad_probs_R, None, grad_in, grad_out, None, None
