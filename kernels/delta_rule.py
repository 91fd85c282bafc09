"""The gated delta rule (arXiv 2412.06464): a state of a value head that decays and is corrected at each token.

Shapes: B sequences of S tokens, K key heads, V value heads (a multiple of K), D width of a key, E width of a value.
"""

from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from moeplan.kernels import delta_rule_reference, delta_rule_torch
from moeplan.kernels.delta_rule_reference import DeltaTokens

_HALF_TYPES = (torch.bfloat16, torch.float16)


class GatedDeltaRule(Protocol):
    """A back end: arguments of :func:`gated_delta_rule`, differentiable in all tensors."""

    def __call__(self, tokens: DeltaTokens, documents: tuple[int, ...], chunk_size: int) -> Tensor: ...


def _fla(tokens: DeltaTokens, documents: tuple[int, ...], chunk_size: int) -> Tensor:
    from moeplan.kernels import delta_rule_fla  # noqa: PLC0415 - beside the package, which few have

    return delta_rule_fla.gated_delta_rule(tokens, documents, chunk_size)


def _triton(tokens: DeltaTokens, documents: tuple[int, ...], chunk_size: int) -> Tensor:
    """Plain torch but for the way from chunk to chunk, where keys are not too wide."""
    from moeplan.kernels import delta_scan_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

    fits = tokens.key.shape[-1] <= delta_scan_triton.MAX_WIDTH
    scan = delta_scan_triton.scan if fits else delta_rule_torch.scan
    return delta_rule_torch.gated_delta_rule(tokens, documents, chunk_size, scan)


BACKENDS: dict[str, GatedDeltaRule] = {
    "reference": delta_rule_reference.gated_delta_rule,
    "torch": delta_rule_torch.gated_delta_rule,
    "triton": _triton,
    "fla": _fla,
}


@cache
def _has_fla() -> bool:
    return find_spec("fla") is not None


def default_backend(x: Tensor) -> str:
    """On CUDA ``fla`` (flash-linear-attention, where installed) for half precision, else ``triton``; else ``torch``."""
    if not x.is_cuda or x.dtype == torch.float64:
        return "torch"
    return "fla" if x.dtype in _HALF_TYPES and _has_fla() else "triton"


def gated_delta_rule(
    tokens: DeltaTokens, documents: tuple[int, ...], *, chunk_size: int = 64, backend: str | None = None
) -> Tensor:
    """What value heads read from their states, out_BSVE in the dtype of the values.

    At each token, with k and q divided by their lengths and S the state [D, E], kept in fp32 at least:
    S' = exp(log_decay) S, then S = S' + beta k (v - k S')^T, then out = q S / sqrt(D).

    ``documents``: lengths that fill a sequence, each of which begins with a state of zeros. ``chunk_size``: tokens that
    are worked on as one block of matrix products; the result does not depend on it.
    """
    return BACKENDS[backend or default_backend(tokens.value)](tokens, documents, chunk_size)
