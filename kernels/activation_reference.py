"""Activations in plain autograd, any device and dtype.

Shapes: R rows, F width after the activation, G width before it: 2F (gate, then up) for gated kinds, else F.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def activation(x_RG: Tensor, kind: str, probs_R: Tensor | None = None) -> Tensor:
    """y_RF; see :func:`moeplan.kernels.activation.activation`."""
    match kind:
        case "swiglu":
            gate_RF, up_RF = x_RG.chunk(2, -1)
            y_RF = F.silu(gate_RF) * up_RF
        case "clamped_swiglu":
            gate_RF, up_RF = x_RG.chunk(2, -1)
            gate_RF = gate_RF.clamp(max=7.0)
            y_RF = (up_RF.clamp(-7.0, 7.0) + 1) * gate_RF * torch.sigmoid(1.702 * gate_RF)
        case "geglu":
            gate_RF, up_RF = x_RG.chunk(2, -1)
            y_RF = F.gelu(gate_RF) * up_RF
        case "gelu":
            y_RF = F.gelu(x_RG)
        case "squared_relu":
            y_RF = F.relu(x_RG).square()
        case _:
            raise ValueError(f"unknown activation {kind!r}; known: swiglu, clamped_swiglu, geglu, gelu, squared_relu")
    return y_RF if probs_R is None else (y_RF * probs_R[:, None]).to(x_RG.dtype)
