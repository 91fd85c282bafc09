"""The short convolution before a recurrence: each channel looks at its own last few tokens, of its document alone.

Shapes: B sequences of S positions, C channels, K taps.
"""

from typing import Protocol

from torch import Tensor

from moeplan.kernels import causal_conv_torch
from moeplan.kernels.triton_choice import default_backend


class CausalConv(Protocol):
    """A back end: arguments of :func:`causal_conv`, differentiable in all tensors."""

    def __call__(
        self, x_BSC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, documents: tuple[int, ...]
    ) -> Tensor: ...


def _triton(x_BSC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, documents: tuple[int, ...]) -> Tensor:
    from moeplan.kernels import causal_conv_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

    return causal_conv_triton.causal_conv(x_BSC, weight_CK, bias_C, documents)


BACKENDS: dict[str, CausalConv] = {"torch": causal_conv_torch.causal_conv, "triton": _triton}


def causal_conv(
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    documents: tuple[int, ...],
    *,
    backend: str | None = None,
) -> Tensor:
    """SiLU of sum_k weight[k] x[t - K + 1 + k] + bias; before a document's first token there are zeros.

    ``documents``: lengths of those that fill a sequence.
    """
    return BACKENDS[backend or default_backend(x_BSC)](x_BSC, weight_CK, bias_C, documents)
