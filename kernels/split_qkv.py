"""Queries, keys and values out of one projection, queries and keys normed where the model does so, and rotated.

Shapes: B batch, S positions, O heads in the projection (N of queries, M of keys, M of values, in that order), D width
of a head.
"""

from typing import Protocol

from torch import Tensor

from moeplan.kernels.norm import rms_norm, rms_norm_reference
from moeplan.kernels.rotary import apply_rotary
from moeplan.kernels.triton_choice import default_backend

Norms = tuple[Tensor, Tensor]
Heads = tuple[Tensor, Tensor, Tensor]


class SplitQkv(Protocol):
    """A back end: arguments of :func:`split_qkv`, differentiable in the projection and both norms' weights."""

    def __call__(
        self, qkv_BSOD: Tensor, num_kv_heads: int, tables: tuple[Tensor, Tensor], norms: Norms | None, eps: float
    ) -> Heads: ...


def _reference(
    qkv_BSOD: Tensor, num_kv_heads: int, tables: tuple[Tensor, Tensor], norms: Norms | None, eps: float
) -> Heads:
    q, k, v = qkv_BSOD.tensor_split((-2 * num_kv_heads, -num_kv_heads), 2)
    if norms is not None:
        q, k = (rms_norm_reference(x, weight_D, eps) for x, weight_D in zip((q, k), norms, strict=True))
    return apply_rotary(q, *tables), apply_rotary(k, *tables), v


def _torch(
    qkv_BSOD: Tensor, num_kv_heads: int, tables: tuple[Tensor, Tensor], norms: Norms | None, eps: float
) -> Heads:
    q, k, v = qkv_BSOD.tensor_split((-2 * num_kv_heads, -num_kv_heads), 2)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    else:
        v = v.contiguous()  # queries and keys are new tensors: a view of the values would keep all of the projection
    return apply_rotary(q, *tables), apply_rotary(k, *tables), v


def _triton(
    qkv_BSOD: Tensor, num_kv_heads: int, tables: tuple[Tensor, Tensor], norms: Norms | None, eps: float
) -> Heads:
    from moeplan.kernels import split_qkv_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

    return split_qkv_triton.split_qkv(qkv_BSOD, num_kv_heads, tables, norms, eps)


BACKENDS: dict[str, SplitQkv] = {"reference": _reference, "torch": _torch, "triton": _triton}


def split_qkv(
    qkv_BSOD: Tensor,
    num_kv_heads: int,
    tables: tuple[Tensor, Tensor],
    norms: Norms | None = None,
    eps: float = 0.0,
    *,
    backend: str | None = None,
) -> Heads:
    """Queries [B, S, N, D], keys and values [B, S, M, D] with N = O - 2 M, in the dtype of the projection.

    Queries and keys are RMS norms over D times ``norms`` (their weights [D], with ``eps``) where given, then rotated by
    ``tables`` of cosines and sines [S, D / 2], as :func:`moeplan.kernels.rotary.apply_rotary` does. Kept for backward:
    with norms the projection, of which the values are then a view; without, nothing but the tables.
    """
    return BACKENDS[backend or default_backend(qkv_BSOD)](qkv_BSOD, num_kv_heads, tables, norms, eps)
