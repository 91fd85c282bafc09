"""The map that sorts copies by expert, as one counting sort: count in blocks, one running sum, place.

Four launches, where a radix sort of the experts, its inverse and a search take twenty.

Shapes: R rows (copies), E experts, B blocks of copies.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128  # copies of a block, each compared with all the others


@triton.jit
def _count(
    index_ptr,
    counts_ptr,
    R,
    E,
    B,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + slot, slot < R, 0).to(tl.int32)
    expert = tl.arange(0, BLOCK_E)
    beyond = tl.sum((slot >= R).to(tl.int32), 0)  # counted as expert 0
    counts = tl.histogram(index, BLOCK_E)
    counts = tl.where(expert == 0, counts - beyond, counts)
    tl.store(counts_ptr + expert * B + block, counts, expert < E)


@triton.jit
def _place(
    index_ptr,
    ends_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    R,
    B,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    first = tl.arange(0, BLOCK)
    slot = block * BLOCK + first
    index = tl.load(index_ptr + slot, slot < R, -1).to(tl.int32)
    other = tl.load(index_ptr + slot, slot < R, -2).to(tl.int32)
    earlier = (index[:, None] == other[None, :]) & (first[None, :] < first[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    before = index * B + block - 1  # where the copies before this block's of the same expert end
    row = tl.load(ends_ptr + before, (slot < R) & (before >= 0), 0) + rank
    tl.store(row_of_slot_ptr + slot, row, slot < R)
    tl.store(slot_of_row_ptr + row, slot, slot < R)


def sort_rows(expert_index_R: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots by row, rows by slot and ends by expert, all int32; see :func:`moeplan.kernels.row_map.row_map`."""
    expert_index_R = expert_index_R.contiguous()
    num_rows, device = expert_index_R.numel(), expert_index_R.device
    slot_of_row_R, row_of_slot_R = torch.empty((2, num_rows), dtype=torch.int32, device=device)
    if not num_rows:
        return slot_of_row_R, row_of_slot_R, torch.zeros(num_experts, dtype=torch.int32, device=device)
    num_blocks = triton.cdiv(num_rows, _BLOCK)
    counts = torch.empty(num_experts * num_blocks, dtype=torch.int32, device=device)
    bins = max(32, triton.next_power_of_2(num_experts))
    _count[num_blocks,](expert_index_R, counts, num_rows, num_experts, num_blocks, _BLOCK, bins)
    ends = counts.cumsum(0, dtype=torch.int32)
    _place[num_blocks,](expert_index_R, ends, slot_of_row_R, row_of_slot_R, num_rows, num_blocks, _BLOCK)
    return slot_of_row_R, row_of_slot_R, ends.view(num_experts, num_blocks)[:, -1].contiguous()
