"""What the Triton back ends share: the type they compute in, and the width of their blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2048  # elements of a row that one program holds at once


def compute_dtype(x: Tensor) -> tl.dtype:
    """fp64 for fp64, otherwise fp32."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def block_of(width: int) -> int:
    """Block of a loop over a row of ``width`` elements: its next power of two, at most MAX_BLOCK."""
    return min(MAX_BLOCK, int(triton.next_power_of_2(max(1, width))))
