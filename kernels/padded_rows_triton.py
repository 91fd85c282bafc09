"""Tiles of padded rows by one launch, where torch takes twenty of a few microseconds each.

Shapes: E experts, N tiles.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILES_AT_ONCE = 32


@triton.jit
def _tiles(
    offsets_ptr, padded_end_ptr, expert_ptr, row_ptr, count_ptr, E, N,
    TILE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program an expert: all experts' numbers of tiles, then its own tiles; the last also those past the end."""
    expert, each = tl.program_id(0), tl.arange(0, BLOCK_E)
    ends = tl.load(offsets_ptr + each, each < E, 0)
    starts = tl.load(offsets_ptr + each - 1, (each > 0) & (each < E), 0)
    num_tiles = tl.where(each < E, (ends - starts + TILE - 1) // TILE, 0)
    first = tl.sum(tl.where(each < expert, num_tiles, 0), 0)
    end = first + tl.sum(tl.where(each == expert, num_tiles, 0), 0)
    row_start = tl.sum(tl.where(each == expert, starts, 0), 0)
    row_end = tl.sum(tl.where(each == expert, ends, 0), 0)
    tl.store(padded_end_ptr + expert, end * TILE)
    last = tl.where(expert == E - 1, N, end)
    for start in range(first, last, BLOCK_N):
        tile = start + tl.arange(0, BLOCK_N)
        is_used = tile < end
        row = row_start + (tile - first) * TILE
        tl.store(expert_ptr + tile, tl.where(is_used, expert, -1), tile < last)
        tl.store(row_ptr + tile, tl.where(is_used, row, 0), tile < last)
        tl.store(count_ptr + tile, tl.where(is_used, tl.minimum(row_end - row, TILE), 0), tile < last)


def tiles(offsets_E: Tensor, num_tiles: int, tile: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Padded ends by expert; expert, first row and number of rows by tile.

    See :class:`moeplan.kernels.padded_rows.PaddedRows`; int32 all.
    """
    num_experts, device = len(offsets_E), offsets_E.device
    padded_end_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    expert_N, row_N, count_N = torch.empty((3, num_tiles), dtype=torch.int32, device=device)
    _tiles[num_experts,](
        offsets_E.contiguous(), padded_end_E, expert_N, row_N, count_N, num_experts, num_tiles, tile,
        triton.next_power_of_2(num_experts), _TILES_AT_ONCE,
    )  # fmt: skip
    return padded_end_E, expert_N, row_N, count_N
