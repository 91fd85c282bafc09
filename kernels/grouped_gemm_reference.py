"""Grouped GEMM as a loop over experts: any device and dtype. Copies the offsets to the host.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""

import torch
from torch import Tensor

from moeplan.kernels.row_map import RowMap


def grouped_gemm(x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor, _copied: RowMap | None = None, /) -> Tensor:
    """y_TF = x times the weight of each row's expert; see :func:`moeplan.kernels.grouped_gemm.grouped_gemm`."""
    ends = offsets_E.tolist()
    num_rows = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    # unbind and split have gradients of one stack and one cat; indexing would fill a zero tensor of all E per expert.
    groups = zip(x_TH.split(num_rows), weight_EHF.unbind(), strict=True)
    return torch.cat([x_MH @ weight_HF for x_MH, weight_HF in groups])
