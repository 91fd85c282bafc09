"""Grouped GEMMs of FP8 operands on Hopper, with one scale a tensor (or expert) or one a block of 128.

Hopper multiplies FP8 only where both operands run along the summed dimension, so every operand comes in that layout:
rows [P, K] and weights [E, N, K] for forward and input gradients; [M, P] and [N, P] for weight gradients. Rows of an
expert are padded to whole tiles (:mod:`moeplan.kernels.padded_rows`), so a tile belongs to one expert and nothing
inside the loops is masked.

Hopper's tensor cores add FP8 products in 14 bits. With one scale a tensor a sum stays there unless it is ``split``:
then it leaves them for fp32 every 128 elements, as blockwise sums always do.

Adding to fp32 takes as long as the products of some 1500 rows (one H200, 128 experts of 1024 rows, 2048 x 1536: 1.57 ms
a micro-batch, 0.63 for a second beside it), so a tile may sum the rows of two micro-batches before it is added.

Shapes: P padded rows, R rows, K summed width, N output width, E experts, M and N sides of a weight gradient.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moeplan.kernels.padded_rows import TILE, PaddedRows
from moeplan.kernels.quantized_gemm import QuantizedOperands
from moeplan.kernels.triton_launch import num_processors


@dataclass(frozen=True)
class Tiling:
    """Tile widths of one launch, its warps and stages, and how many tiles of rows are walked together.

    ``per_processor`` programs of a multiprocessor take turns: one multiplies while another's output leaves.
    ``prefetch``: a total that is added to is brought to L2 while its tile is multiplied.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int
    flatten: bool = True
    per_processor: int = 1
    prefetch: bool = False


# Chosen on one H200 (results/2026-11-29-h200-fp8.md): 128 x 256 needs 48 KiB a stage of the 227 KiB there are.
ROWS = Tiling(256, 128, 8, 3, 16)
# Two tiles of 128 x 128 a multiprocessor, their totals in L2 before: 2.38 ms for 128 experts' matrices of 2048 x 1536
# and 768 x 2048 over 131,072 rows, 2.56 without the latter, 2.70 with one tile of 128 x 256.
GRADIENT = Tiling(128, 128, 4, 3, 8, flatten=False, per_processor=2, prefetch=True)
# Sums that leave the tensor cores have a second accumulator: half the tile, for two of a whole one spill 24 registers.
TWO_ACCUMULATORS = Tiling(128, 128, 8, 4, 16)
MAX_PARTS = 2  # whose products one visit of a tile of a weight gradient sums


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


@triton.jit
def _span(end_ptr, expert, BLOCK_K: tl.constexpr):
    """Where the padded rows of an expert begin, and how many blocks they are."""
    start = tl.load(end_ptr + expert - 1, expert > 0, 0)
    return start, (tl.load(end_ptr + expert) - start) // BLOCK_K


@triton.jit
def _sum(
    total, a_desc, b_desc, a_scale_ptr, b_scale_ptr, start, num_k, rows, cols, m, n, M, N,
    BLOCKWISE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``total`` plus a @ b.T over ``num_k`` blocks of rows; only what has scales by block is scaled."""
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
    return total


@triton.jit
def _prefetch(total_ptr, expert, rows, first_col, M, N, BLOCK_N: tl.constexpr):
    """Bring a tile of the total to L2, a line of 128 bytes after the other, where it is added to after the sum."""
    cols = tl.minimum(first_col + tl.arange(0, BLOCK_N // 32) * 32, N - 1)
    place = total_ptr + (expert.to(tl.int64) * M + tl.minimum(rows, M - 1)[:, None]) * N + cols[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _change_of_scale(scale, next_scale):
    """What a sum is multiplied by before products of another scale join it, its scale then, and whether they do not.

    The tensor cores add products to one sum, so it is brought to their scale. That would overflow where the first
    part's scale is far larger. So products that all together are below a quarter of the first part's smallest one are
    left out: an expert's million of them, 448 x 57,344 each, at 2**-72 of a scale whose smallest product is 2**-25.
    Sums, under 2**56, stay under 2**128. Left out are scales below fp32's normal numbers as well, which may divide by
    zero. A part of zeros has scales of 1: beside it gradients under 1e-17 count as zero. Comparisons with NaN leave
    nothing out, and scales that are not finite leave no finite sum.
    """
    is_left_out = next_scale <= tl.maximum(scale * 2.1175824e-22, 1.1754944e-38)
    change = tl.where(is_left_out, 1.0, scale / next_scale)
    return change, tl.where(is_left_out, scale, next_scale), is_left_out


@triton.jit(do_not_specialize=["E"])
def _gradient(
    a_desc, b_desc, end_ptr, a_scale_ptr, b_scale_ptr, next_a_desc, next_b_desc, next_end_ptr, next_a_scale_ptr,
    next_b_scale_ptr, total_ptr, total_desc, E, M, N,
    BLOCKWISE: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr, REDUCE: tl.constexpr, IS_PAIR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    each = num_m * num_n
    if IS_PAIR and not BLOCKWISE:
        first_scale = tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
        next_scale = tl.load(next_a_scale_ptr) * tl.load(next_b_scale_ptr)
        change, scale, is_left_out = _change_of_scale(first_scale, next_scale)
    for tile in tl.range(tl.program_id(0), E * each, tl.num_programs(0), flatten=FLATTEN):
        expert = tile // each
        first_m = tile % each // (GROUP * num_n) * GROUP
        size_m = min(num_m - first_m, GROUP)
        m = first_m + tile % each % (GROUP * num_n) % size_m
        n = tile % each % (GROUP * num_n) // size_m
        start, num_k = _span(end_ptr, expert, BLOCK_K)
        if IS_PAIR:  # read before they are needed
            next_start, next_num_k = _span(next_end_ptr, expert, BLOCK_K)
        rows, cols = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
        if REDUCE and PREFETCH:
            _prefetch(total_ptr, expert, rows, n * BLOCK_N, M, N, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        total = _sum(
            total, a_desc, b_desc, a_scale_ptr, b_scale_ptr, start, num_k, rows, cols, m, n, M, N,
            BLOCKWISE, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if IS_PAIR:
            if not BLOCKWISE:
                total *= change
                next_num_k = tl.where(is_left_out, 0, next_num_k)
            total = _sum(
                total, next_a_desc, next_b_desc, next_a_scale_ptr, next_b_scale_ptr, next_start, next_num_k, rows, cols,
                m, n, M, N, BLOCKWISE, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if not BLOCKWISE:
            total *= scale if IS_PAIR else tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
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
        _rows[min(tiles, how.per_processor * num_processors(x_PK.device)),](
            TensorDescriptor.from_tensor(x_PK, [TILE, how.block_k]),
            TensorDescriptor.from_tensor(weight_ENK.view(-1, width_k), [how.block_n, how.block_k]),
            y_RN, rows.expert_of_tile, rows.row_of_tile, rows.count_of_tile, scale_x, scale_E, rows.num_tiles,
            width_n, width_k, blockwise, split, TILE, how.block_n, how.block_k, how.group, how.flatten,
            num_warps=how.num_warps, num_stages=how.num_stages,
        )  # fmt: skip
    return y_RN


def gradient_gemm_(
    total_EMN: Tensor, parts: Sequence[QuantizedOperands],
    *, add: bool = True, blockwise: bool = False, split: bool = False, tiling: Tiling | None = None,
) -> None:  # fmt: skip
    """Add to (or put into) ``total_EMN`` each expert's a @ b.T over its rows of one part or two, times their scales.

    Scales are one fp32 number each; blockwise [P / 128, M] and [P / 128, N]. ``split``: see above. A third part is a
    ValueError.
    """
    num_experts, width_m, width_n = total_EMN.shape
    how = tiling or (TWO_ACCUMULATORS if blockwise or split else GRADIENT)
    tiles = num_experts * triton.cdiv(width_m, TILE) * triton.cdiv(width_n, how.block_n)
    if len(parts) > MAX_PARTS:
        raise ValueError(f"parts: got {len(parts)}, allowed: at most {MAX_PARTS}")
    parts = [part for part in parts if part.rows.num_rows]  # no bulk copy has a dimension of 0
    if not parts:
        if not add:
            total_EMN.zero_()
    elif tiles:
        reduces = add and total_EMN.is_cuda and total_EMN.dtype == torch.float32
        second = _inputs(parts[1], how) if len(parts) == MAX_PARTS else (None,) * 5
        _gradient[min(tiles, how.per_processor * num_processors(total_EMN.device)),](
            *_inputs(parts[0], how), *second,
            total_EMN, TensorDescriptor.from_tensor(total_EMN, [1, TILE, how.block_n // 4]), num_experts, width_m,
            width_n, blockwise, split, add, reduces, len(parts) == MAX_PARTS, TILE,
            how.block_n, how.block_k, how.group, how.flatten, how.prefetch, num_warps=how.num_warps,
            num_stages=how.num_stages,
        )  # fmt: skip


def _inputs(part: QuantizedOperands, how: Tiling) -> tuple[TensorDescriptor, TensorDescriptor, Tensor, Tensor, Tensor]:
    (a_MP, scale_a, _), (b_NP, scale_b, _), rows = part
    return (
        TensorDescriptor.from_tensor(a_MP, [TILE, how.block_k]),
        TensorDescriptor.from_tensor(b_NP, [how.block_n, how.block_k]),
        rows.padded_end_E, scale_a, scale_b,
    )  # fmt: skip
