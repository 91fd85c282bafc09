"""Rows of one token id summed in a fixed order.

Tokens are sorted by row, and a program takes a chunk of them. What it sums of a row that no other chunk has goes to the
total at once. Sums of a row that goes on over the ends of chunks wait for a second pass, which adds them from chunk to
chunk: without atomics, so that sums do not depend on timing, and with many programs for an id that many tokens have.

Shapes: T tokens, V rows of the embedding, H hidden, C chunks.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton reads every annotation as a constant; kernels take many arguments
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeplan.kernels.triton_launch import compute_dtype

# 16,384 tokens of 2048 are 1024 programs, which 132 multiprocessors run at once: each waits for one row after another.
ROWS = 32
_MAX_BLOCK = 1024


@triton.jit
def _add(total_ptr, row, H, col, mask, sums):
    place = total_ptr + row.to(tl.int64) * H + col
    total = tl.load(place, mask)
    tl.store(place, (total.to(sums.dtype) + sums).to(total.dtype), mask)


@triton.jit
def _sum_chunks(
    total_ptr, grad_ptr, row_ptr, token_ptr, head_ptr, tail_ptr, T, H,
    ROWS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads: sums of the first row of a chunk where it began before; tails: of the last that goes on and is no head."""
    chunk = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < H
    start = chunk * ROWS
    end = tl.minimum(start + ROWS, T)
    partial = chunk.to(tl.int64) * H + col
    row = tl.load(row_ptr + start)
    before = tl.load(row_ptr + start - 1, start > 0, other=-1)
    sums = tl.zeros((BLOCK,), DTYPE)
    for index in range(start, end):
        following = tl.load(row_ptr + index + 1, index + 1 < T, other=-1)
        token = tl.load(token_ptr + index)
        sums += tl.load(grad_ptr + token * H + col, mask & (row >= 0), other=0.0).to(DTYPE)
        if (following != row) | (index + 1 == end):
            if row >= 0:
                if row == before:
                    tl.store(head_ptr + partial, sums, mask)
                elif following == row:
                    tl.store(tail_ptr + partial, sums, mask)
                else:
                    _add(total_ptr, row, H, col, mask, sums)
            sums = tl.zeros((BLOCK,), DTYPE)
        row = following


@triton.jit
def _join_chunks(
    total_ptr, row_ptr, head_ptr, tail_ptr, T, H, ROWS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """A program for each chunk but the last: if a row that goes on begins in it, its tail and the heads after it."""
    chunk = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < H
    start = chunk * ROWS
    end = start + ROWS
    row = tl.load(row_ptr + end - 1)
    began_before = tl.load(row_ptr + start - 1, start > 0, other=-1) == row
    following = tl.load(row_ptr + end)
    if (row >= 0) & (following == row) & (began_before == 0):
        last = chunk
        while following == row:  # scalars alone: Triton 3.7 fails to compile one that sums tensors as well
            last += 1
            following = tl.load(row_ptr + (last + 1) * ROWS, (last + 1) * ROWS < T, other=-1)
        place = chunk.to(tl.int64) * H + col
        sums = tl.load(tail_ptr + place, mask, other=0.0)
        for _ in range(chunk, last):
            place += H
            sums += tl.load(head_ptr + place, mask, other=0.0)
        _add(total_ptr, row, H, col, mask, sums)


def add_rows_(total_VH: Tensor, grad_TH: Tensor, row_T: Tensor) -> None:
    """See :func:`moeplan.kernels.embedding.add_rows_`."""
    num_tokens, width = grad_TH.shape
    if not num_tokens:
        return
    assert total_VH.is_contiguous(), "rows of the total follow one another"
    sorted_T, token_T = row_T.to(torch.int32).sort(stable=True)  # half as many passes as over 64 bits
    num_chunks, block = triton.cdiv(num_tokens, ROWS), min(_MAX_BLOCK, triton.next_power_of_2(width))
    dtype = compute_dtype(total_VH)
    partials_CH = torch.empty(
        2, num_chunks, width, device=grad_TH.device, dtype=torch.promote_types(total_VH.dtype, torch.float32)
    )
    shape, num_blocks = (num_tokens, width), triton.cdiv(width, block)
    _sum_chunks[num_chunks, num_blocks](
        total_VH, grad_TH.contiguous(), sorted_T, token_T, *partials_CH, *shape, ROWS, dtype, block
    )
    if num_chunks > 1:
        _join_chunks[num_chunks - 1, num_blocks](total_VH, sorted_T, *partials_CH, *shape, ROWS, dtype, block)
