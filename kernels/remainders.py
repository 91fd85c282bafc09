"""fp32 values in two halves: bf16, rounded half up, and the int16 with a sign that those lack of the fp32 bits.

bits of the fp32 value = (bits of the bf16 one << 16) + remainder, exact for every value. Back ends that have not got
this in their own kernel join, update and split a stretch at a time.

Shapes: N elements.
"""

import torch
from torch import Tensor


def join(weight_N: Tensor, remainder_N: Tensor) -> Tensor:
    """The fp32 values, exact."""
    return ((weight_N.view(torch.int16).to(torch.int32) << 16) + remainder_N).view(torch.float32)


def split_(main_N: Tensor, weight_N: Tensor, remainder_N: Tensor) -> None:
    """Write both halves of fp32 values."""
    bits_N = main_N.contiguous().view(torch.int32)
    high_N = (bits_N + 0x8000) >> 16
    weight_N.view(torch.int16).copy_(high_N)
    remainder_N.copy_(bits_N - (high_N << 16))
