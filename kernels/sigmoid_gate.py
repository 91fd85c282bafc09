"""A gate on what attention or an expert gives: y = x sigmoid(gate)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_SIGMOID_BACKWARD = torch.ops.aten.sigmoid_backward


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Values times the sigmoid of ``gate``, both of one shape and dtype; backward keeps both and nothing else."""
    y: Tensor = _SigmoidGate.apply(x, gate)
    return y


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return torch.sigmoid(gate).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        open_frac = torch.sigmoid(gate)
        return grad * open_frac, _SIGMOID_BACKWARD(grad * x, open_frac)
