"""Activations of expert and dense MLPs, optionally times the routing probability of each row.

Shapes: R rows, F width after the activation, G width before it: 2F (gate, then up) for gated kinds, else F.
"""

from typing import Literal, Protocol

from torch import Tensor

from moeplan.kernels import activation_reference, activation_torch
from moeplan.kernels.triton_choice import default_backend

ActivationKind = Literal["swiglu", "clamped_swiglu", "geglu", "gelu", "squared_relu"]


class Activation(Protocol):
    """A back end: arguments of :func:`activation`, differentiable in x and probs."""

    def __call__(self, x_RG: Tensor, kind: ActivationKind, probs_R: Tensor | None = None) -> Tensor: ...


def _triton(x_RG: Tensor, kind: ActivationKind, probs_R: Tensor | None = None) -> Tensor:
    from moeplan.kernels import activation_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

    return activation_triton.activation(x_RG, kind, probs_R)


BACKENDS: dict[str, Activation] = {
    "reference": activation_reference.activation,
    "torch": activation_torch.activation,
    "triton": _triton,
}


def activation(
    x_RG: Tensor, kind: ActivationKind, probs_R: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """y_RF = act(x), times ``probs_R`` where given, in the dtype of x.

    swiglu is silu(gate) * up, geglu is gelu(gate) * up with gate = x[:, :F] and up = x[:, F:]; gelu is the exact one
    (erf); squared_relu is relu(x)**2; clamped_swiglu is GPT-OSS's (clamp(up, -7, 7) + 1) * g * sigmoid(1.702 g) with
    g = min(gate, 7). All but the reference keep only x and probs for backward and recompute the rest,
    which is what lets FC2's output go (report section 1.6). x may have more than two dimensions without probs.
    """
    return BACKENDS[backend or default_backend(x_RG)](x_RG, kind, probs_R)
