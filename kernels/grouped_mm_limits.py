"""What torch.nn.functional.grouped_mm takes.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""

import torch
from torch import Tensor

# Rows of every operand must start at a multiple of this (torch 2.13: "strides should be multiple of 16 bytes").
ALIGNMENT_BYTES = 16


def is_supported(x_TH: Tensor, weight_EHF: Tensor) -> bool:
    """Whether grouped_mm takes these operands, in forward and in both gradients: the only statement of its limits.

    torch 2.13: bf16 on CUDA (other dtypes there run a loop that waits for the host); bf16, fp16 and fp32 on CPU; H and
    F of whole 16-byte words.
    """
    dtypes = (torch.bfloat16,) if x_TH.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    widths_bytes = (width * x_TH.element_size() for width in weight_EHF.shape[1:])
    return x_TH.dtype in dtypes and all(width_bytes % ALIGNMENT_BYTES == 0 for width_bytes in widths_bytes)
