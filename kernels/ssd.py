"""The recurrence of Mamba-2 (state-space duality, arXiv 2405.21060): a state of a head that decays at each token.

Shapes: B sequences of S tokens, H heads, P width of a value, G groups of keys and queries, N width of those.
"""

from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from moeplan.kernels import ssd_reference, ssd_torch
from moeplan.kernels.ssd_reference import SsdHeads, SsdTokens

_HALF_TYPES = (torch.bfloat16, torch.float16)


class Ssd(Protocol):
    """A back end: arguments of :func:`ssd`, differentiable in all tensors."""

    def __call__(self, tokens: SsdTokens, heads: SsdHeads, documents: tuple[int, ...], chunk_size: int) -> Tensor: ...


def _mamba(tokens: SsdTokens, heads: SsdHeads, documents: tuple[int, ...], chunk_size: int) -> Tensor:
    from moeplan.kernels import ssd_mamba  # noqa: PLC0415 - beside the package, which few have

    return ssd_mamba.ssd(tokens, heads, documents, chunk_size)


BACKENDS: dict[str, Ssd] = {"reference": ssd_reference.ssd, "torch": ssd_torch.ssd, "mamba": _mamba}


@cache
def _has_mamba() -> bool:
    return find_spec("mamba_ssm") is not None


def default_backend(x: Tensor) -> str:
    """``mamba`` (the package mamba_ssm) for half precision on CUDA where it is installed, else ``torch``."""
    return "mamba" if x.is_cuda and x.dtype in _HALF_TYPES and _has_mamba() else "torch"


def ssd(
    tokens: SsdTokens,
    heads: SsdHeads,
    documents: tuple[int, ...],
    *,
    chunk_size: int = 128,
    backend: str | None = None,
) -> Tensor:
    """What heads read from their states, out_BSHP in the dtype of the values.

    At each token, with S the state [N, P], kept in fp32 at least: S = exp(rate dt) S + dt k x^T, then
    out = q S + skip x.

    ``documents``: lengths that fill a sequence, each of which begins with a state of zeros. ``chunk_size``: tokens that
    are worked on as one block of matrix products; the result does not depend on it.
    """
    return BACKENDS[backend or default_backend(tokens.value)](tokens, heads, documents, chunk_size)
