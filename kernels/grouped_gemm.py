"""Grouped GEMM: each expert's rows times that expert's weight, in one call.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""

from typing import Protocol

from torch import Tensor

from moeplan.kernels import grouped_gemm_by_expert, grouped_gemm_reference, grouped_gemm_torch
from moeplan.kernels.back_end_choice import Shape, chosen
from moeplan.kernels.grouped_weight_grad import OPERATION as WEIGHT_GRAD
from moeplan.kernels.host_offsets import start_host_copy
from moeplan.kernels.row_map import RowMap

OPERATION = "grouped_gemm"


class GroupedGemm(Protocol):
    """A back end: arguments and errors of :func:`grouped_gemm`, differentiable in x and weight."""

    def __call__(self, x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor, copied: RowMap | None, /) -> Tensor: ...


BACKENDS: dict[str, GroupedGemm] = {
    "reference": grouped_gemm_reference.grouped_gemm,
    "torch": grouped_gemm_torch.grouped_gemm,
    "by_expert": grouped_gemm_by_expert.grouped_gemm,
}


def grouped_gemm(
    x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor, *, copied: RowMap | None = None, backend: str | None = None
) -> Tensor:
    """y_TF with y[t] = x[t] @ weight[e] for the rows t of expert e, with gradients for x and weight.

    ``offsets_E`` (int32, on the device of x) holds where the rows of each expert end: those of expert e run from
    ``offsets[e - 1]`` to ``offsets[e]``, an empty expert repeats its predecessor, and the last offset must be T. x and
    weight share a dtype. ``copied``: the map by which rows of x are copies of tokens, which then may wait in place of
    rows. Without ``backend``: the one chosen for this shape, else torch's. KeyError for an unknown one.
    """
    shape: Shape = tuple(weight_EHF.shape)
    if chosen(WEIGHT_GRAD, shape) == "by_expert":
        start_host_copy(offsets_E)  # backward then need not wait for what runs before it
    return BACKENDS[backend or chosen(OPERATION, shape) or "torch"](x_TH, weight_EHF, offsets_E, copied)
