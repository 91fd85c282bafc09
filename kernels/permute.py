"""Gathering tokens by expert and bringing them back.

Shapes: T tokens, K experts per token, R = T * K rows sorted by expert, H width.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from moeplan.kernels import permute_reference, permute_torch
from moeplan.kernels.row_map import RowMap
from moeplan.kernels.triton_choice import default_backend


class PermuteBackend(Protocol):
    """A back end: the three functions below, differentiable in every floating-point argument."""

    def permute(self, x_TH: Tensor, rows: RowMap) -> Tensor: ...

    def unpermute(self, rows_RH: Tensor, rows: RowMap, probs_TK: Tensor | None = None) -> Tensor: ...

    def permute_probs(self, probs_TK: Tensor, rows: RowMap) -> Tensor: ...


def _triton() -> PermuteBackend:
    from moeplan.kernels import permute_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

    return permute_triton


BACKENDS: dict[str, Callable[[], PermuteBackend]] = {
    "reference": lambda: permute_reference,
    "torch": lambda: permute_torch,
    "triton": _triton,
}


def permute(x_TH: Tensor, rows: RowMap, *, backend: str | None = None) -> Tensor:
    """rows_RH: a copy of each token for each of its K experts, sorted by expert."""
    return BACKENDS[backend or default_backend(x_TH)]().permute(x_TH, rows)


def unpermute(rows_RH: Tensor, rows: RowMap, probs_TK: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """y_TH: the sum of each token's K rows, each times its probability where ``probs_TK`` is given.

    Without probabilities, as the memory-efficient permutation has it (they were applied before the second expert
    GEMM), nothing but the map is kept for backward (report section 1.6). The dtype is that of the rows.
    """
    return BACKENDS[backend or default_backend(rows_RH)]().unpermute(rows_RH, rows, probs_TK)


def permute_probs(probs_TK: Tensor, rows: RowMap, *, backend: str | None = None) -> Tensor:
    """probs_R: the probability that travels with each row."""
    return BACKENDS[backend or default_backend(probs_TK)]().permute_probs(probs_TK, rows)
