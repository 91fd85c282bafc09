"""Weight gradients of a grouped GEMM by torch: all experts in one call and then one addition, or expert by expert.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""

from collections.abc import Sequence

from torch.nn import functional as F

from moeplan.kernels.grouped_mm_limits import is_supported
from moeplan.kernels.host_offsets import host_offsets
from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.weight_grad import add_weight_grad_
from moeplan.kernels.weight_grad_pairs import Operands


def add_(main: MainGrad, parts: Sequence[Operands]) -> None:
    """See :func:`moeplan.kernels.grouped_weight_grad.add_grouped_weight_grad_`; a 16-bit gradient is made and added.

    What grouped_mm does not take goes expert by expert.
    """
    for part in parts:
        if is_supported(part.x_TH, main.total):
            main.add_(F.grouped_mm(part.x_TH.t(), part.grad_TF, offs=part.offsets_E))
        else:
            _add_by_expert_(main, part)


def add_by_expert_(main: MainGrad, parts: Sequence[Operands]) -> None:
    """One GEMM an expert: cuBLAS on CUDA, any dtype elsewhere. Copies the offsets to the host."""
    for part in parts:
        _add_by_expert_(main, part)


def _add_by_expert_(main: MainGrad, operands: Operands) -> None:
    x_TH, grad_TF, offsets_E = operands.x_TH, operands.grad_TF, operands.offsets_E
    start = 0
    for total_HF, end in zip(main.total.unbind(), host_offsets(offsets_E), strict=True):
        part = MainGrad(total_HF, main.is_clear)
        if end > start:
            add_weight_grad_(part, x_TH[start:end], grad_TF[start:end])
        else:
            part.add_zeros_()
        start = end
    main.is_clear = False
