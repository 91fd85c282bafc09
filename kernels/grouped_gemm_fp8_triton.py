"""Grouped GEMMs of FP8 operands on Hopper, with one scale a tensor (or expert) or one a block of 128.

Hopper multiplies FP8 only where both operands run along the summed dimension, so every operand comes in that layout:
rows [P, K] and weights [E, N, K] for forward and input gradients; [M, P] and [N, P] for weight gradients. Rows of an
expert are padded to whole tiles (:mod:`moeplan.kernels.padded_rows`), so a tile belongs to one expert and nothing
inside the loops is masked.

Hopper's tensor cores add FP8 products in 14 bits. With one scale a tensor a sum stays there unless it is ``split``:
then it leaves them for fp32 every 128 elements, as blockwise sums always do.

Shapes: P padded rows, R rows, K summed width, N output width, E experts, M and N sides of a weight gradient.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moeplan.kernels.padded_rows import TILE, PaddedRows
from moeplan.kernels.triton_launch import num_processors


@dataclass(frozen=True)
class Tiling:
    """Tile widths of one launch, its warps and stages, and how many tiles of rows are walked together."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int
    flatten: bool = True


# Chosen on one H200 (results/2026-11-29-h200-fp8.md): 128 x 256 needs 48 KiB a stage of the 227 KiB there are.
ROWS = Tiling(256, 128, 8, 3, 16)
GRADIENT = Tiling(256, 128, 8, 3, 8, flatten=False)
# Sums that leave the tensor cores have a second accumulator: half the tile, for two of a whole one spill 24 registers.
TWO_ACCUMULATORS = Tiling(128, 128, 8, 4, 16)


@triton.jit(do_not_specialize=["num_m"])
def _rows(
    x_desc, w_desc, y_ptr, expert_ptr, row_ptr, count_ptr, x_scale_ptr, w_scale_ptr, num_m, N, K,
    BLOCKWISE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        first_m = tile // (GROUP * num_n) * GROUP
        size_m = min(num_m - first_m, GROUP)
        m = first_m + tile % (GROUP * num_n) % size_m
        n = tile % (GROUP * num_n) // size_m
        expert = tl.load(expert_ptr + m)
        # Tiles past the last padded row have no expert and nothing to sum.
        num_k = tl.where(expert < 0, 0, tl.cdiv(K, BLOCK_K))
        place = tl.maximum(expert, 0) * N + n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(num_k):
            x = x_desc.load([m * BLOCK_M, k * BLOCK_K])
            w = w_desc.load([place, k * BLOCK_K])
            if BLOCKWISE:
                part = tl.dot(x, w.T)
                scale_x = tl.load(x_scale_ptr + k * (num_m * BLOCK_M) + m * BLOCK_M + tl.arange(0, BLOCK_M))
                scale_w = tl.load(w_scale_ptr + (tl.maximum(expert, 0) * num_n + n) * num_k + k)
                total += part * (scale_x * scale_w)[:, None]
            elif SPLIT:
                total += tl.dot(x, w.T)
            else:
                total = tl.dot(x, w.T, total)
        if not BLOCKWISE:
            total *= tl.load(x_scale_ptr) * tl.load(w_scale_ptr + tl.maximum(expert, 0))
        rows = tl.arange(0, BLOCK_M)
        cols = n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows < tl.load(count_ptr + m))[:, None] & (cols < N)[None, :]
        out = y_ptr + (tl.load(row_ptr + m) + rows).to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(out, total.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _halves(x):
    """Left and right half of a tile."""
    rows: tl.constexpr = x.shape[0]
    cols: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (rows, 2, cols // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["E"])
def _gradient(
    a_desc, b_desc, total_ptr, total_desc, end_ptr, a_scale_ptr, b_scale_ptr, E, M, N, P,
    BLOCKWISE: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr, REDUCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    each = num_m * num_n
    for tile in tl.range(tl.program_id(0), E * each, tl.num_programs(0), flatten=FLATTEN):
        expert = tile // each
        first_m = tile % each // (GROUP * num_n) * GROUP
        size_m = min(num_m - first_m, GROUP)
        m = first_m + tile % each % (GROUP * num_n) % size_m
        n = tile % each % (GROUP * num_n) // size_m
        start = tl.load(end_ptr + expert - 1, expert > 0, 0)
        num_k = (tl.load(end_ptr + expert) - start) // BLOCK_K
        rows, cols = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(num_k):
            a = a_desc.load([m * BLOCK_M, start + k * BLOCK_K])
            b = b_desc.load([n * BLOCK_N, start + k * BLOCK_K])
            if BLOCKWISE:
                part = tl.dot(a, b.T)
                block = start // BLOCK_K + k
                scale_a = tl.load(a_scale_ptr + block * M + rows, rows < M, 0)
                scale_b = tl.load(b_scale_ptr + block * N + cols, cols < N, 0)
                total += part * scale_a[:, None] * scale_b[None, :]
            elif SPLIT:
                total += tl.dot(a, b.T)
            else:
                total = tl.dot(a, b.T, total)
        if not BLOCKWISE:
            total *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
        if REDUCE:
            # Added in L2 while the next tile is multiplied, in quarters because a whole one needs 128 KiB on the way.
            left, right = _halves(total)
            first, second = _halves(left)
            third, fourth = _halves(right)
            WIDTH: tl.constexpr = BLOCK_N // 4
            col = n * BLOCK_N
            total_desc.atomic_add([expert, m * BLOCK_M, col], first[None])
            total_desc.atomic_add([expert, m * BLOCK_M, col + WIDTH], second[None])
            total_desc.atomic_add([expert, m * BLOCK_M, col + 2 * WIDTH], third[None])
            total_desc.atomic_add([expert, m * BLOCK_M, col + 3 * WIDTH], fourth[None])
        else:
            out = total_ptr + (expert.to(tl.int64) * M + rows[:, None]) * N + cols[None, :]
            mask = (rows < M)[:, None] & (cols < N)[None, :]
            if ADD:
                total += tl.load(out, mask, 0)
            tl.store(out, total.to(total_ptr.dtype.element_ty), mask)


def rows_gemm(
    x_PK: Tensor, scale_x: Tensor, weight_ENK: Tensor, scale_E: Tensor, rows: PaddedRows,
    *, blockwise: bool = False, split: bool = False, tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """y_RN in bf16: rows times the weight of their expert, times both scales; ``split`` as the module says.

    Scales are one fp32 number a tensor of rows and one an expert; blockwise [K / 128, P] and [E, N / 128, K / 128].
    """
    _, width_n, width_k = weight_ENK.shape
    y_RN = torch.empty((rows.num_rows, width_n), dtype=torch.bfloat16, device=x_PK.device)
    how = tiling or (TWO_ACCUMULATORS if blockwise or split else ROWS)
    tiles = rows.num_tiles * triton.cdiv(width_n, how.block_n)
    if tiles and rows.num_rows:
        _rows[min(tiles, num_processors(x_PK.device)),](
            TensorDescriptor.from_tensor(x_PK, [TILE, how.block_k]),
            TensorDescriptor.from_tensor(weight_ENK.view(-1, width_k), [how.block_n, how.block_k]),
            y_RN, rows.expert_of_tile, rows.row_of_tile, rows.count_of_tile, scale_x, scale_E, rows.num_tiles,
            width_n, width_k, blockwise, split, TILE, how.block_n, how.block_k, how.group, how.flatten,
            num_warps=how.num_warps, num_stages=how.num_stages,
        )  # fmt: skip
    return y_RN


def gradient_gemm_(
    total_EMN: Tensor, a_MP: Tensor, scale_a: Tensor, b_NP: Tensor, scale_b: Tensor, rows: PaddedRows,
    *, add: bool = True, blockwise: bool = False, split: bool = False, tiling: Tiling | None = None,
) -> None:  # fmt: skip
    """Add to (or put into) ``total_EMN`` each expert's a @ b.T over its rows, times both scales; ``split``: see above.

    Scales are one fp32 number each; blockwise [P / 128, M] and [P / 128, N].
    """
    num_experts, width_m, width_n = total_EMN.shape
    how = tiling or (TWO_ACCUMULATORS if blockwise or split else GRADIENT)
    tiles = num_experts * triton.cdiv(width_m, TILE) * triton.cdiv(width_n, how.block_n)
    if not rows.num_rows:
        if not add:
            total_EMN.zero_()
    elif tiles:
        reduces = add and total_EMN.is_cuda and total_EMN.dtype == torch.float32
        _gradient[min(tiles, num_processors(a_MP.device)),](
            TensorDescriptor.from_tensor(a_MP, [TILE, how.block_k]),
            TensorDescriptor.from_tensor(b_NP, [how.block_n, how.block_k]),
            total_EMN, TensorDescriptor.from_tensor(total_EMN, [1, TILE, how.block_n // 4]), rows.padded_end_E,
            scale_a, scale_b, num_experts, width_m, width_n, a_MP.shape[1], blockwise, split, add, reduces, TILE,
            how.block_n, how.block_k, how.group, how.flatten, num_warps=how.num_warps, num_stages=how.num_stages,
        )  # fmt: skip
