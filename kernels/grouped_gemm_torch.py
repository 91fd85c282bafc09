"""Products of a grouped GEMM by torch.nn.functional.grouped_mm. On CUDA the offsets stay on the device.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""

from torch import Tensor
from torch.nn import functional as F

from moeplan.kernels import grouped_gemm_reference
from moeplan.kernels.grouped_mm_limits import is_supported


def product(x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor) -> Tensor:
    """See :class:`moeplan.kernels.grouped_gemm.GroupedProduct`; what grouped_mm does not take, by the reference."""
    if is_supported(x_TH, weight_EHF):
        return F.grouped_mm(x_TH, weight_EHF, offs=offsets_E)
    return grouped_gemm_reference.grouped_gemm(x_TH, weight_EHF, offsets_E)
