"""Weight gradients of a grouped GEMM added to fp32 main gradients in the kernel's own epilogue, for Hopper.

A persistent kernel: each program takes output tiles of all experts in turn. Operands come by bulk copies (TMA), whose
transposes the tensor cores read in place. The addition is a bulk reduction in L2 (no tile of the total comes to the
multiprocessor), so the next tile's products start while it drains; each element is added once, so it is exact and the
same in every run. The last rows of an expert, fewer than a block, come the same way; those of the next one, which
follow them, are cleared in one operand. Two micro-batches' rows may go into one product, which is then added once.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.triton_launch import num_processors
from moeplan.kernels.weight_grad_pairs import Operands

_TILES_A_GROUP = 8  # tiles of H that follow one another before F moves on: their operands stay in L2


@dataclass(frozen=True, slots=True)
class Config:
    """Tile of H x F, rows a step, and how the output leaves: in ``2**halvings`` parts of a tile.

    ``reduce``: added by bulk reductions; else read, added and written.
    """

    tile_h: int = 128
    tile_f: int = 256
    rows: int = 64
    num_stages: int = 4
    num_warps: int = 8
    halvings: int = 2
    programs_a_processor: int = 1
    reduce: bool = True


# By name of the back end. One H200, ms with the addition: 128 experts of 1024 rows, 768 x 2048: 1.05, 1.03, 1.07;
# 8 of 4096 rows, 4096 x 28,672: 12.5, 12.6, 13.3.
CONFIGS = {
    "triton": Config(),
    "triton_rows32": Config(rows=32, num_stages=6),
    "triton_tile128": Config(tile_f=128, num_stages=3, num_warps=4, programs_a_processor=2),
}


@triton.jit
def _put(
    total_desc,
    part,
    expert,
    first_h,
    first_f,
    IS_FIRST: tl.constexpr,
    REDUCE: tl.constexpr,
):
    block = part[None, :, :]
    if IS_FIRST:
        total_desc.store([expert, first_h, first_f], block)
    elif REDUCE:
        total_desc.atomic_add([expert, first_h, first_f], block)
    else:
        total_desc.store([expert, first_h, first_f], total_desc.load([expert, first_h, first_f]) + block)


@triton.jit
def _put_halves(
    total_desc,
    part,
    expert,
    first_h,
    first_f,
    IS_FIRST: tl.constexpr,
    REDUCE: tl.constexpr,
    HALVINGS: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_F: tl.constexpr,
):
    if HALVINGS == 0:
        _put(total_desc, part, expert, first_h, first_f, IS_FIRST, REDUCE)
    else:
        HALF: tl.constexpr = TILE_F // 2
        left, right = tl.reshape(part, (TILE_H, 2, HALF)).permute(0, 2, 1).split()
        _put_halves(
            total_desc, left, expert, first_h, first_f, IS_FIRST, REDUCE, HALVINGS - 1, TILE_H, HALF
        )  # fmt: skip
        _put_halves(
            total_desc, right, expert, first_h, first_f + HALF, IS_FIRST, REDUCE, HALVINGS - 1, TILE_H, HALF
        )  # fmt: skip


@triton.jit
def _sum(
    product,
    x_desc,
    grad_desc,
    offsets_ptr,
    expert,
    first_h,
    first_f,
    ROWS: tl.constexpr,
):
    """``product`` plus x.T @ grad over the rows of an expert."""
    start = tl.load(offsets_ptr + tl.maximum(expert - 1, 0))
    start = tl.where(expert > 0, start, 0)
    end = tl.load(offsets_ptr + expert)
    whole_end = start + (end - start) // ROWS * ROWS
    for row in range(start, whole_end, ROWS):
        x = x_desc.load([row, first_h])
        grad = grad_desc.load([row, first_f])
        product = tl.dot(x.T, grad, product)
    if whole_end < end:
        x = x_desc.load([whole_end, first_h])
        grad = grad_desc.load([whole_end, first_f])
        x = tl.where((whole_end + tl.arange(0, ROWS) < end)[:, None], x, 0.0)
        product = tl.dot(x.T, grad, product)
    return product


@triton.jit
def _add_products(
    x_desc,
    grad_desc,
    offsets_ptr,
    next_x_desc,
    next_grad_desc,
    next_offsets_ptr,
    total_desc,
    E,
    H,
    F,
    TILE_H: tl.constexpr,
    TILE_F: tl.constexpr,
    ROWS: tl.constexpr,
    HALVINGS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    REDUCE: tl.constexpr,
    GROUP: tl.constexpr,
    IS_PAIR: tl.constexpr,
):
    tiles_h = tl.cdiv(H, TILE_H)
    tiles_f = tl.cdiv(F, TILE_F)
    tiles = tiles_h * tiles_f
    for tile in range(tl.program_id(0), E * tiles, tl.num_programs(0)):
        expert = tile // tiles
        place = tile % tiles
        first_of_group = place // (GROUP * tiles_f) * GROUP
        group = tl.minimum(tiles_h - first_of_group, GROUP)
        first_h = (first_of_group + place % (GROUP * tiles_f) % group) * TILE_H
        first_f = place % (GROUP * tiles_f) // group * TILE_F
        product = tl.zeros((TILE_H, TILE_F), tl.float32)
        product = _sum(product, x_desc, grad_desc, offsets_ptr, expert, first_h, first_f, ROWS)
        if IS_PAIR:
            product = _sum(product, next_x_desc, next_grad_desc, next_offsets_ptr, expert, first_h, first_f, ROWS)
        _put_halves(
            total_desc, product, expert, first_h, first_f, IS_FIRST, REDUCE, HALVINGS, TILE_H, TILE_F
        )  # fmt: skip


def add_(main: MainGrad, parts: Sequence[Operands], name: str = "triton") -> None:
    """See :class:`moeplan.kernels.grouped_weight_grad.GroupedWeightGrad`. Rows of 16 whole bytes."""
    config, total_EHF = CONFIGS[name], main.total
    parts = [part for part in parts if len(part.x_TH)]  # no bulk copy has a dimension of 0
    if not parts:
        main.add_zeros_()
        return
    E, H, F = total_EHF.shape
    out_width, device = config.tile_f >> config.halvings, total_EHF.device
    reduce = config.reduce and total_EHF.is_cuda  # Triton's interpreter has no bulk reduction
    num_tiles = E * triton.cdiv(H, config.tile_h) * triton.cdiv(F, config.tile_f)
    num_programs = min(num_tiles, config.programs_a_processor * num_processors(device))
    _add_products[num_programs,](
        *_inputs(parts[0], config), *_inputs(parts[-1], config),
        TensorDescriptor.from_tensor(total_EHF, [1, config.tile_h, out_width]),
        E, H, F, config.tile_h, config.tile_f, config.rows, config.halvings, main.is_clear, reduce, _TILES_A_GROUP,
        len(parts) == 2, num_stages=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    main.is_clear = False


def _inputs(part: Operands, config: Config) -> tuple[TensorDescriptor, TensorDescriptor, Tensor]:
    return (
        TensorDescriptor.from_tensor(part.x_TH.contiguous(), [config.rows, config.tile_h]),
        TensorDescriptor.from_tensor(part.grad_TF.contiguous(), [config.rows, config.tile_f]),
        part.offsets_E,
    )
