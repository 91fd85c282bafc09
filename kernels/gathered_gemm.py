"""Grouped GEMMs between tokens and rows: each expert's rows are copies of tokens, or are summed to tokens again.

Shapes: T tokens, R rows sorted by expert, H input width, F output width, E experts.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from moeplan.kernels.back_end_choice import chosen
from moeplan.kernels.grouped_gemm import grouped_gemm
from moeplan.kernels.permute import permute, unpermute
from moeplan.kernels.row_map import RowMap

OPERATION = "gathered_gemm"


class GatheredGemm(Protocol):
    """A back end: the two functions below, differentiable in the first two arguments."""

    def gathered_gemm(self, x_TH: Tensor, weight_EHF: Tensor, rows: RowMap) -> Tensor: ...

    def summed_gemm(self, x_RH: Tensor, weight_EHF: Tensor, rows: RowMap) -> Tensor: ...


class Copied:
    """Rows are copied before the GEMM, and so are gradients of the tokens that rows are summed to."""

    def gathered_gemm(self, x_TH: Tensor, weight_EHF: Tensor, rows: RowMap) -> Tensor:
        """See :func:`gathered_gemm`."""
        return grouped_gemm(permute(x_TH, rows), weight_EHF, rows.offsets_E)

    def summed_gemm(self, x_RH: Tensor, weight_EHF: Tensor, rows: RowMap) -> Tensor:
        """See :func:`summed_gemm`."""
        return unpermute(grouped_gemm(x_RH, weight_EHF, rows.offsets_E), rows)


def _triton() -> GatheredGemm:
    from moeplan.kernels import gathered_gemm_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

    return gathered_gemm_triton


BACKENDS: dict[str, Callable[[], GatheredGemm]] = {"copy": Copied, "triton_gather": _triton}


def gathered_gemm(x_TH: Tensor, weight_EHF: Tensor, rows: RowMap, *, backend: str | None = None) -> Tensor:
    """y_RF with y[r] = x[token of r] @ weight[expert of r]: the permutation before experts' first matrix with it.

    ``rows`` has no gaps. Without ``backend``: the one chosen for this shape, else copies.
    """
    return _backend(weight_EHF, backend).gathered_gemm(x_TH, weight_EHF, rows)


def summed_gemm(x_RH: Tensor, weight_EHF: Tensor, rows: RowMap, *, backend: str | None = None) -> Tensor:
    """y_TF: the sum over each token's rows of x[r] @ weight[expert of r], for experts' second matrix.

    Rows are summed in order of the token's choices, so the result is the same each time.
    """
    return _backend(weight_EHF, backend).summed_gemm(x_RH, weight_EHF, rows)


def _backend(weight_EHF: Tensor, backend: str | None) -> GatheredGemm:
    return BACKENDS[backend or chosen(OPERATION, tuple(weight_EHF.shape)) or "copy"]()
