"""Grouped GEMMs whose kernel reads rows by index, so that no copy of tokens is made, for Hopper.

A persistent kernel: tiles of 128 rows, each of one expert, as :mod:`moeplan.kernels.padded_rows` counts them. Weights
come by bulk copies (TMA); those of Hopper cannot gather, so rows come by address. Sums over a token's rows are a pass
of their own: added where they are made they would need atomics, whose order changes.

Shapes: T tokens, R rows sorted by expert, H input width, F output width, E experts, N and K output and summed width.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from moeplan.kernels.grouped_gemm_torch import product
from moeplan.kernels.grouped_weight_grad import add_operands_
from moeplan.kernels.main_grad import MainGrad, main_grad_of
from moeplan.kernels.padded_rows import TILE, padded_rows
from moeplan.kernels.permute_triton import summed
from moeplan.kernels.row_map import RowMap
from moeplan.kernels.triton_launch import num_processors
from moeplan.kernels.weight_grad_pairs import Operands
from moeplan.kernels.weight_grad_queue import now_or_later


@dataclass(frozen=True, slots=True)
class Config:
    """Tile widths: 128 rows by ``block_n`` columns, ``block_k`` of the sum at a time."""

    block_n: int = 256
    block_k: int = 64
    group: int = 8  # tiles of rows walked together, so that a weight's columns stay in L2
    num_stages: int = 4
    num_warps: int = 8


CONFIG = Config()


@triton.jit(do_not_specialize=["num_m"])
def _gather_rows(
    x_ptr, index_ptr, weight_desc, y_ptr, expert_ptr, row_ptr, count_ptr, num_m, N, K,
    TURNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y[r] = x[index[r]] @ weight of r's expert, [K, N] or, ``TURNED``, [N, K]."""
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        first_m = tile // (GROUP * num_n) * GROUP
        size_m = tl.minimum(num_m - first_m, GROUP)
        m = first_m + tile % (GROUP * num_n) % size_m
        col = tile % (GROUP * num_n) // size_m * BLOCK_N
        expert = tl.load(expert_ptr + m)
        if expert >= 0:  # tiles past the last one have none
            row = tl.load(row_ptr + m) + tl.arange(0, BLOCK_M)
            is_row = tl.arange(0, BLOCK_M) < tl.load(count_ptr + m)
            token = tl.load(index_ptr + row, is_row, 0).to(tl.int64)
            k = tl.arange(0, BLOCK_K)
            place = x_ptr + token[:, None] * K + k[None, :]
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for first_k in range(0, K, BLOCK_K):
                x = tl.load(place + first_k, is_row[:, None] & (first_k + k < K)[None, :], 0.0)
                if TURNED:
                    weight = weight_desc.load([expert, col, first_k]).reshape(BLOCK_N, BLOCK_K)
                    total = tl.dot(x, weight.T, total)
                else:
                    weight = weight_desc.load([expert, first_k, col]).reshape(BLOCK_K, BLOCK_N)
                    total = tl.dot(x, weight, total)
            cols = col + tl.arange(0, BLOCK_N)
            out = y_ptr + row.to(tl.int64)[:, None] * N + cols[None, :]
            tl.store(out, total.to(y_ptr.dtype.element_ty), is_row[:, None] & (cols < N)[None, :])


def gathered_gemm(x_TH: Tensor, weight_EHF: Tensor, rows: RowMap) -> Tensor:
    """See :func:`moeplan.kernels.gathered_gemm.gathered_gemm`."""
    y_RF: Tensor = _Gathered.apply(x_TH, weight_EHF, rows)
    return y_RF


def summed_gemm(x_RH: Tensor, weight_EHF: Tensor, rows: RowMap) -> Tensor:
    """See :func:`moeplan.kernels.gathered_gemm.summed_gemm`."""
    y_TF: Tensor = _Summed.apply(x_RH, weight_EHF, rows)
    return y_TF


def _gathered(x_TK: Tensor, weight_EAB: Tensor, rows: RowMap, token_R: Tensor, *, turned: bool) -> Tensor:
    """Rows of x by their tokens, times the weight [E, K, N] of their expert, or [E, N, K]."""
    width_n, num_rows, config = weight_EAB.shape[1 if turned else 2], len(token_R), CONFIG
    x_TK, width_k = x_TK.contiguous(), x_TK.shape[1]
    y_RN = x_TK.new_empty((num_rows, width_n))
    if num_rows:
        tiles = padded_rows(rows.offsets_E, num_rows)
        block = [1, config.block_n, config.block_k] if turned else [1, config.block_k, config.block_n]
        num_tiles = tiles.num_tiles * triton.cdiv(width_n, config.block_n)
        _gather_rows[min(num_tiles, num_processors(x_TK.device)),](
            x_TK, token_R, TensorDescriptor.from_tensor(weight_EAB.contiguous(), block), y_RN, tiles.expert_of_tile,
            tiles.row_of_tile, tiles.count_of_tile, tiles.num_tiles, width_n, width_k, turned, TILE, config.block_n,
            config.block_k, config.group, num_stages=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
    return y_RN


def _weight_grad(main: MainGrad | None, weight_EHF: Tensor, operands: Operands) -> Tensor | None:
    """Added to the main gradient, now or when its micro-batch's turn comes; returned where there is none."""
    if main is not None:
        now_or_later(lambda: add_operands_(main, operands))
        return None
    whole = MainGrad(torch.empty(weight_EHF.shape, dtype=torch.float32, device=weight_EHF.device))
    add_operands_(whole, operands)
    return whole.total.to(weight_EHF.dtype)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EHF: Tensor, rows: RowMap) -> Tensor:
        ctx.rows, ctx.main_grad, token_R = rows, main_grad_of(weight_EHF), rows.token_of_row_R
        ctx.save_for_backward(x_TH, weight_EHF, token_R)
        return _gathered(x_TH, weight_EHF, rows, token_R, turned=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TH, weight_EHF, token_R = ctx.saved_tensors
        grad_RF, rows, grad_x_TH, grad_weight_EHF = grad_RF.contiguous(), ctx.rows, None, None
        if ctx.needs_input_grad[0]:
            grad_x_TH = summed(product(grad_RF, weight_EHF.transpose(1, 2), rows.offsets_E), rows.row_of_slot_TK)
        if ctx.needs_input_grad[1]:
            operands = Operands(x_TH.contiguous(), grad_RF, rows.offsets_E, token_R, gathers="x")
            grad_weight_EHF = _weight_grad(ctx.main_grad, weight_EHF, operands)
        return grad_x_TH, grad_weight_EHF, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, weight_EHF: Tensor, rows: RowMap) -> Tensor:
        ctx.rows, ctx.main_grad = rows, main_grad_of(weight_EHF)
        x_RH = x_RH.contiguous()
        ctx.save_for_backward(x_RH, weight_EHF)
        return summed(product(x_RH, weight_EHF, rows.offsets_E), rows.row_of_slot_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RH, weight_EHF = ctx.saved_tensors
        rows, token_R, grad_x_RH, grad_weight_EHF = ctx.rows, ctx.rows.token_of_row_R, None, None
        grad_TF = grad_TF.contiguous()
        if ctx.needs_input_grad[0]:
            grad_x_RH = _gathered(grad_TF, weight_EHF, rows, token_R, turned=True)
        if ctx.needs_input_grad[1]:
            operands = Operands(x_RH, grad_TF, rows.offsets_E, token_R, gathers="grad")
            grad_weight_EHF = _weight_grad(ctx.main_grad, weight_EHF, operands)
        return grad_x_RH, grad_weight_EHF, None
