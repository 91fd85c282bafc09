"""RMS norm of each head or group with a gate, after a recurrence.

Shapes: ... leading dimensions, G heads (or groups), W width of each.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.kernels.triton_choice import default_backend


class GatedNorm(Protocol):
    """A back end: arguments of :func:`gated_norm`, differentiable in x, gate and weight."""

    def __call__(self, x_GW: Tensor, gate_GW: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor: ...


def _torch(x_GW: Tensor, gate_GW: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    dtype = torch.promote_types(x_GW.dtype, torch.float32)
    wide_GW, open_GW = x_GW.to(dtype), F.silu(gate_GW.to(dtype))
    if gate_first:
        wide_GW = wide_GW * open_GW
    normed_GW = wide_GW * torch.rsqrt(wide_GW.square().mean(-1, keepdim=True) + eps) * weight
    return (normed_GW if gate_first else normed_GW * open_GW).to(x_GW.dtype)


def _triton(x_GW: Tensor, gate_GW: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    from moeplan.kernels import gated_norm_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

    if x_GW.shape[-1] > gated_norm_triton.MAX_WIDTH:
        return _torch(x_GW, gate_GW, weight, eps, gate_first=gate_first)
    return gated_norm_triton.gated_norm(x_GW, gate_GW, weight, eps, gate_first=gate_first)


BACKENDS: dict[str, GatedNorm] = {"torch": _torch, "triton": _triton}


def gated_norm(
    x_GW: Tensor, gate_GW: Tensor, weight: Tensor, eps: float, *, gate_first: bool, backend: str | None = None
) -> Tensor:
    """X / sqrt(mean(x**2) + eps) * weight * SiLU(gate) over W, in the dtype of x.

    ``gate_first``: x times SiLU(gate) is normed instead (Mamba-2). ``weight``: [W] for all heads, or [G, W].
    """
    return BACKENDS[backend or default_backend(x_GW)](x_GW, gate_GW, weight, eps, gate_first=gate_first)
