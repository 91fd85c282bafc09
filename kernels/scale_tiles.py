"""Where Blackwell's tensor cores look for the scales of blocks: tiles of 128 rows by 4 blocks, 512 bytes each.

Inside a tile the scale of row r and block b is byte (r % 32) * 16 + (r // 32) * 4 + b; tiles follow one another along
the summed dimension first (cuBLAS documentation, "1D block scaling factors layout"; torch's SWIZZLE_32_4_4). Missing
rows and blocks are filled up with zeros.

Shapes: ... leading dimensions, R rows, B blocks along the sum, P padded rows in T tiles of 128, C columns.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.kernels.padded_rows import TILE, PaddedRows

BLOCKS = 4


def tiled(scale_RB: Tensor) -> Tensor:
    """Scales of one byte [..., R, B] in tiles, [..., R up to a multiple of 128, B up to one of 4], as one block."""
    missing = (-scale_RB.shape[-1] % BLOCKS, -scale_RB.shape[-2] % TILE)
    padded_RB = F.pad(scale_RB.view(torch.uint8), (0, missing[0], 0, missing[1]))
    parts = padded_RB.unflatten(-1, (-1, BLOCKS)).unflatten(-3, (-1, 4, 32))
    # Tile of rows, quarter, row of 32, tile of blocks, block: quarters and tiles of blocks change places.
    in_tiles: Tensor = parts.transpose(-4, -2).reshape(padded_RB.shape).view(scale_RB.dtype)
    return in_tiles


def tiled_by_expert(scale_CB: Tensor, rows: PaddedRows) -> Tensor:
    """Scales [C, B] of blocks along padded rows, each expert's tiles in one piece; never waits for the device.

    As torch's grouped GEMM that sums over rows has them: [C, T tiles], of which an expert with t tiles from tile s on
    takes C * t from C * s on.
    """
    tiles_CT = tiled(scale_CB).view(torch.uint8).reshape(-1, rows.num_tiles, TILE * scale_CB.shape[1] // rows.num_tiles)
    end_E = rows.padded_end_E // TILE
    starts = torch.cat([end_E.new_zeros(1), end_E])  # what no expert uses comes last, as if it were one more
    counts = torch.cat([end_E, end_E.new_full((1,), rows.num_tiles)]) - starts
    expert_T = torch.where(rows.expert_of_tile < 0, len(end_E), rows.expert_of_tile)
    num_c = len(tiles_CT)
    first_T = starts[expert_T] * num_c + torch.arange(rows.num_tiles, device=end_E.device) - starts[expert_T]
    place_CT = first_T + torch.arange(num_c, device=end_E.device)[:, None] * counts[expert_T]
    by_expert = torch.empty_like(tiles_CT.flatten(0, 1))
    by_expert[place_CT.flatten()] = tiles_CT.flatten(0, 1)
    return by_expert.view(num_c * TILE, -1).view(scale_CB.dtype)
