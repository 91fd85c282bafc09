"""Activations that keep only their input and the probabilities for backward.

Shapes: R rows, F width after the activation, G width before it: 2F (gate, then up) for gated kinds, else F.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_SILU_BACKWARD = torch.ops.aten.silu_backward
_GELU_BACKWARD = torch.ops.aten.gelu_backward
# GPT-OSS's clamped SwiGLU: where gate and up are cut off, and the gain inside the sigmoid.
_LIMIT, _ALPHA = 7.0, 1.702


def activation(x_RG: Tensor, kind: str, probs_R: Tensor | None = None) -> Tensor:
    """y_RF; see :func:`moeplan.kernels.activation.activation`."""
    if kind not in _KINDS:
        raise ValueError(f"unknown activation {kind!r}; known: {', '.join(_KINDS)}")
    y_RF: Tensor = _Activation.apply(x_RG, probs_R, kind)
    return y_RF


def _gated(act: Callable[[Tensor], Tensor], x_RG: Tensor) -> Tensor:
    gate_RF, up_RF = x_RG.chunk(2, -1)
    return act(gate_RF).mul_(up_RF)


def _gated_backward(
    act: Callable[[Tensor], Tensor], act_backward: Callable[[Tensor, Tensor], Tensor], grad_RF: Tensor, x_RG: Tensor
) -> Tensor:
    gate_RF, up_RF = x_RG.chunk(2, -1)
    grad_x_RG = torch.empty_like(x_RG)
    grad_gate_RF, grad_up_RF = grad_x_RG.chunk(2, -1)
    torch.mul(grad_RF, act(gate_RF), out=grad_up_RF)
    grad_gate_RF.copy_(act_backward(grad_RF * up_RF, gate_RF))
    return grad_x_RG


def _clamped_swiglu(x_RG: Tensor) -> Tensor:
    gate_RF, up_RF = x_RG.chunk(2, -1)
    gate_RF = gate_RF.clamp(max=_LIMIT)
    return up_RF.clamp(-_LIMIT, _LIMIT).add_(1).mul_(gate_RF).mul_(torch.sigmoid(_ALPHA * gate_RF))


def _clamped_swiglu_backward(grad_RF: Tensor, x_RG: Tensor) -> Tensor:
    gate_RF, up_RF = x_RG.chunk(2, -1)
    grad_x_RG = torch.empty_like(x_RG)
    grad_gate_RF, grad_up_RF = grad_x_RG.chunk(2, -1)
    clamped_RF = gate_RF.clamp(max=_LIMIT)
    sigmoid_RF = torch.sigmoid(_ALPHA * clamped_RF)
    torch.mul(grad_RF, clamped_RF * sigmoid_RF, out=grad_up_RF)
    grad_up_RF.mul_(up_RF.abs() <= _LIMIT)
    slope_RF = sigmoid_RF * (1 + _ALPHA * clamped_RF * (1 - sigmoid_RF)) * (gate_RF <= _LIMIT)
    torch.mul(grad_RF, slope_RF * (up_RF.clamp(-_LIMIT, _LIMIT) + 1), out=grad_gate_RF)
    return grad_x_RG


def _squared_relu(x_RF: Tensor) -> Tensor:
    return F.relu(x_RF).square_()


# kind -> (forward, gradient of x from the gradient of y and x)
_KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "swiglu": (lambda x: _gated(F.silu, x), lambda grad, x: _gated_backward(F.silu, _SILU_BACKWARD, grad, x)),
    "clamped_swiglu": (_clamped_swiglu, _clamped_swiglu_backward),
    "geglu": (lambda x: _gated(F.gelu, x), lambda grad, x: _gated_backward(F.gelu, _GELU_BACKWARD, grad, x)),
    "gelu": (F.gelu, _GELU_BACKWARD),
    "squared_relu": (_squared_relu, lambda grad, x: F.relu(x).mul_(grad).mul_(2)),
}


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RG: Tensor, probs_R: Tensor | None, kind: str) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(x_RG, probs_R)
        y_RF = _KINDS[kind][0](x_RG)
        return y_RF if probs_R is None else y_RF.mul_(probs_R[:, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_RG, probs_R = ctx.saved_tensors
        forward, backward = _KINDS[ctx.kind]
        if probs_R is None:
            return backward(grad_RF, x_RG), None, None
        grad_probs_R = None
        if ctx.needs_input_grad[1]:
            grad_probs_R = torch.linalg.vecdot(grad_RF, forward(x_RG)).to(probs_R.dtype)
        weighted_grad_RF = (grad_RF * probs_R[:, None]).to(x_RG.dtype)
        return backward(weighted_grad_RF, x_RG), grad_probs_R, None
