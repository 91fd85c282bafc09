"""Rows of each expert padded to whole tiles, with everything kept on the device.

Low-precision GEMMs sum over rows in their weight gradients, and need that number in whole tiles (report section 5.4).
The padding is made while quantizing; tensors in bf16 stay without it. How many tiles are used depends on the routing,
how many there are at most does not, so no host waits for it.

Shapes: R rows sorted by expert, E experts, P padded rows in N tiles of 128.
"""
# ruff: noqa: N802, N815 - shape suffixes

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 128


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Which rows each tile holds. All tensors are int32 and on the device.

    ``padded_end_E`` is where the padded rows of each expert end, ``num_rows`` is R. Of each tile: ``expert_of_tile``
    (-1: past the last one), ``row_of_tile`` the first of its rows, ``count_of_tile`` how many are not padding.
    """

    num_rows: int
    num_tiles: int
    padded_end_E: Tensor
    expert_of_tile: Tensor
    row_of_tile: Tensor
    count_of_tile: Tensor

    @property
    def num_padded(self) -> int:
        """P, at least the padded rows there are."""
        return self.num_tiles * TILE

    @property
    def source_P(self) -> Tensor:
        """The row that each padded row holds, R for padding."""
        inside = torch.arange(TILE, device=self.row_of_tile.device)
        row = self.row_of_tile[:, None] + inside
        return torch.where(inside < self.count_of_tile[:, None], row, self.num_rows).flatten()


def padded_rows(offsets_E: Tensor, num_rows: int) -> PaddedRows:
    """The padding of ``num_rows`` rows whose experts end at ``offsets_E`` (int32). Never waits for the device.

    At most R + 127 E rows, in whole tiles.
    """
    num_experts = len(offsets_E)
    num_tiles = (num_rows + (TILE - 1) * min(num_experts, num_rows)) // TILE
    if num_experts == 1:
        return _one_expert(num_rows, num_tiles, offsets_E)
    if offsets_E.is_cuda:
        from moeplan.kernels import padded_rows_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

        return PaddedRows(num_rows, num_tiles, *padded_rows_triton.tiles(offsets_E, num_tiles, TILE))
    starts_E = torch.cat([offsets_E.new_zeros(1), offsets_E[:-1]])
    padded_end_E = (offsets_E - starts_E + (TILE - 1)).div(TILE, rounding_mode="floor").cumsum(0) * TILE
    padded_start_E = torch.cat([padded_end_E.new_zeros(1), padded_end_E[:-1]])
    first = torch.arange(num_tiles, device=offsets_E.device) * TILE
    expert = torch.searchsorted(padded_end_E, first, right=True)
    inside = expert.clamp(max=num_experts - 1)
    row = first - padded_start_E[inside] + starts_E[inside]
    count = (offsets_E[inside] - row).clamp(0, TILE)
    used = expert < num_experts
    return PaddedRows(
        num_rows,
        num_tiles,
        padded_end_E.to(torch.int32),
        torch.where(used, expert, -1).to(torch.int32),
        torch.where(used, row, 0).to(torch.int32),
        torch.where(used, count, 0).to(torch.int32),
    )


def dense_rows(num_rows: int, device: torch.device) -> PaddedRows:
    """The padding of rows that all meet the same weight."""
    end_E = torch.full((1,), num_rows, dtype=torch.int32, device=device)
    return _one_expert(num_rows, -(-num_rows // TILE), end_E)


def _one_expert(num_rows: int, num_tiles: int, offsets_E: Tensor) -> PaddedRows:
    """Three kernels where the general case takes twenty, or on CUDA one of our own."""
    row = torch.arange(num_tiles, dtype=torch.int32, device=offsets_E.device) * TILE
    end_E = torch.full_like(offsets_E, num_tiles * TILE)
    return PaddedRows(num_rows, num_tiles, end_E, torch.zeros_like(row), row, (num_rows - row).clamp(max=TILE))
