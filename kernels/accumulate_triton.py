"""Accumulation over two dtypes with wide loads.

Shapes: N elements.
"""
# ruff: noqa: ANN001, ANN202 - Triton reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _add(total_ptr, part_ptr, N, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < N
    total = tl.load(total_ptr + place, mask)
    tl.store(total_ptr + place, total + tl.load(part_ptr + place, mask).to(total.dtype), mask)


def accumulate_(total_N: Tensor, part_N: Tensor) -> Tensor:
    """See :func:`moeplan.kernels.accumulate.accumulate_`."""
    num_elements = total_N.numel()
    if num_elements:
        _add[triton.cdiv(num_elements, _BLOCK),](total_N, part_N, num_elements, _BLOCK)
    return total_N
