"""What the Triton back ends share: the type they compute in, widths of blocks, numbers of programs, and tiles."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2048  # elements of a row that one program holds at once
_INTERPRETED_PROCESSORS = 4  # on a CPU the interpreter runs programs in turn: enough of them to share work out


def compute_dtype(x: Tensor) -> tl.dtype:
    """fp64 for fp64, otherwise fp32."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def block_of(width: int) -> int:
    """Block of a loop over a row of ``width`` elements: its next power of two, at most MAX_BLOCK."""
    return min(MAX_BLOCK, int(triton.next_power_of_2(max(1, width))))


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU, for kernels whose programs take tile after tile; on a CPU a few."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
