"""Weight gradients of a grouped GEMM, added to main gradients.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from moeplan.kernels import grouped_gemm_quack, grouped_weight_grad_torch
from moeplan.kernels.back_end_choice import chosen
from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.row_map import RowMap
from moeplan.kernels.weight_grad_pairs import Operands

OPERATION = "grouped_weight_grad"


class GroupedWeightGrad(Protocol):
    """A back end: adds the gradients of one micro-batch or of two, in one pass over ``main`` where it can."""

    def __call__(self, main: MainGrad, parts: Sequence[Operands]) -> None: ...


def _triton(name: str, main: MainGrad, parts: Sequence[Operands]) -> None:
    from moeplan.kernels import grouped_weight_grad_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

    grouped_weight_grad_triton.add_(main, parts, name)


# The kernel with tiles of several shapes: which is fastest depends on the experts.
TRITON = ("triton", "triton_rows32", "triton_tile128")
BACKENDS: dict[str, GroupedWeightGrad] = {
    "by_expert": grouped_weight_grad_torch.add_by_expert_,
    "torch": grouped_weight_grad_torch.add_,
    **{name: partial(_triton, name) for name in TRITON},
    **{name: partial(grouped_gemm_quack.add_, name) for name in grouped_gemm_quack.TILES},
}


def add_grouped_weight_grad_(
    main: MainGrad,
    x_TH: Tensor,
    grad_TF: Tensor,
    offsets_E: Tensor,
    *,
    copied: RowMap | None = None,
    backend: str | None = None,
) -> None:
    """``main`` [E, H, F] plus x[rows of e].t() @ grad[rows of e] for each expert e.

    ``offsets_E`` is as :func:`moeplan.kernels.grouped_gemm.grouped_gemm` takes it; an expert without rows gets zeros
    from the first gradient of a step. Without ``backend``: the one chosen for this shape, else the default. Where
    ``main`` takes two micro-batches at a time, the first of two waits for the second: its tokens, where
    ``copied`` is the map by which rows of x are copies of them.
    """
    one = Operands(x_TH, grad_TF, offsets_E, copied)
    parts = main.due(one)
    if parts:
        add_parts_(main, parts, backend=backend)


def add_parts_(main: MainGrad, parts: Sequence[Operands], *, backend: str | None = None) -> None:
    """As :func:`add_grouped_weight_grad_`, for the gradients of one micro-batch or of two, now."""
    name = backend or chosen(OPERATION, tuple(main.total.shape)) or _default(main.total, parts[0].x_TH)
    BACKENDS[name](main, parts)


def _default(total_EHF: Tensor, x_TH: Tensor) -> str:
    return "triton" if triton_takes(total_EHF, x_TH) else "torch"


def triton_takes(total_EHF: Tensor, x_TH: Tensor) -> bool:
    """Whether the kernel runs: on Hopper, whose shared memory its tiles fill, bf16 into fp32, whole 16-byte rows."""
    return (
        x_TH.is_cuda
        and x_TH.dtype == torch.bfloat16
        and total_EHF.dtype == torch.float32
        and total_EHF.shape[1] % 8 == 0
        and total_EHF.shape[2] % 8 == 0
        and torch.cuda.get_device_capability(x_TH.device)[0] == 9
    )
