"""Products of a grouped GEMM as one GEMM of the dense library an expert: fastest where experts are few and large.

One H200, 8 experts of 4096 rows, 4096 x 28,672: cuBLAS 673 and 691 TFLOP/s forward and for the input's gradient,
grouped_mm 638 and 664. The host needs to know the offsets: it waits for them once a forward, when nothing else does.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""

from itertools import pairwise

import torch
from torch import Tensor

from moeplan.kernels.host_offsets import host_offsets


def product(x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor) -> Tensor:
    """See :class:`moeplan.kernels.grouped_gemm.GroupedProduct`."""
    y_TF = x_TH.new_empty((x_TH.shape[0], weight_EHF.shape[2]))
    for (start, end), weight_HF in zip(pairwise((0, *host_offsets(offsets_E))), weight_EHF.unbind(), strict=True):
        if end > start:
            torch.mm(x_TH[start:end], weight_HF, out=y_TF[start:end])
    return y_TF
