"""States of the gated delta rule from chunk to chunk in one kernel each way, where plain torch has four a chunk.

A program holds some columns of one head's state [D, E] and goes through the chunks; columns do not depend on each
other. Backward goes the other way with the gradient of the state, and what it leaves of each chunk gives the other
gradients by products over all chunks at once.

Shapes: B sequences, n chunks of C tokens, K key heads, G value heads a key head, D width of a key, E of a value,
W = E + D.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from functools import lru_cache
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_WIDTH = 128  # of a key: tiles of two chunks take 104 KiB then, and 184 at 256, which an A100 has not
_OPTIONS = {"num_warps": 8, "num_stages": 2}
_MAX_COLUMNS = 32  # of a state in one program: 128 programs for 32 heads 128 wide
_SMALLEST_SIDE = 16  # of a tile that tl.dot takes


@triton.jit
def _places(chunk, N, HEADS, C, D, E, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """Number of this program's head among those of chunk ``chunk``, and what of its tiles exists."""
    sequence, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    place = (sequence.to(tl.int64) * N + chunk) * HEADS + head
    row, channel = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    column = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    return place, row, channel, column, row < C, channel < D, column < E


@triton.jit
def _forward(
    solved_ptr, keys_ptr, left_ptr, goes_on_ptr, states_ptr, corrections_ptr, N, HEADS, C, D, E,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    state = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    for chunk in range(N):
        place, row, channel, column, is_row, is_channel, is_column = _places(
            chunk, N, HEADS, C, D, E, BLOCK_C, BLOCK_D, BLOCK_E
        )
        state *= tl.load(goes_on_ptr + chunk)
        of_state = (place * D + channel)[:, None] * E + column[None, :]
        tl.store(states_ptr + of_state, state, is_channel[:, None] & is_column[None, :])
        solved = solved_ptr + ((place * C + row) * (E + D))[:, None]
        own = tl.load(solved + column[None, :], is_row[:, None] & is_column[None, :], 0)
        taken = tl.load(solved + E + channel[None, :], is_row[:, None] & is_channel[None, :], 0)
        correction = own - tl.dot(taken, state, input_precision="ieee")
        of_correction = (place * C + row)[:, None] * E + column[None, :]
        tl.store(corrections_ptr + of_correction, correction, is_row[:, None] & is_column[None, :])
        key = tl.load(
            keys_ptr + (place * C + row)[:, None] * D + channel[None, :], is_row[:, None] & is_channel[None, :], 0
        )
        state = state * tl.load(left_ptr + place) + tl.dot(key.T, correction, input_precision="ieee")


@triton.jit
def _backward(
    solved_ptr, keys_ptr, left_ptr, goes_on_ptr, grad_states_ptr, grad_corrections_ptr, grad_ends_ptr, grad_own_ptr,
    N, HEADS, C, D, E,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    grad_end = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)  # of the state that the chunk hands on
    for step in range(N):
        chunk = N - 1 - step
        place, row, channel, column, is_row, is_channel, is_column = _places(
            chunk, N, HEADS, C, D, E, BLOCK_C, BLOCK_D, BLOCK_E
        )
        of_state = (place * D + channel)[:, None] * E + column[None, :]
        has_state = is_channel[:, None] & is_column[None, :]
        tl.store(grad_ends_ptr + of_state, grad_end, has_state)
        has_key = is_row[:, None] & is_channel[None, :]
        key = tl.load(keys_ptr + (place * C + row)[:, None] * D + channel[None, :], has_key, 0)
        of_correction = (place * C + row)[:, None] * E + column[None, :]
        has_correction = is_row[:, None] & is_column[None, :]
        grad = tl.load(grad_corrections_ptr + of_correction, has_correction, 0)
        grad += tl.dot(key, grad_end, input_precision="ieee")
        tl.store(grad_own_ptr + of_correction, grad, has_correction)
        taken = tl.load(solved_ptr + ((place * C + row) * (E + D))[:, None] + E + channel[None, :], has_key, 0)
        grad_end = grad_end * tl.load(left_ptr + place) - tl.dot(taken.T, grad, input_precision="ieee")
        grad_end += tl.load(grad_states_ptr + of_state, has_state, 0)
        grad_end *= tl.load(goes_on_ptr + chunk)


def scan(
    solved_BnKGCW: Tensor, keys_BnKGCD: Tensor, left_BnKG: Tensor, starts: frozenset[int]
) -> tuple[Tensor, Tensor]:
    """See :func:`moeplan.kernels.delta_rule_torch.scan`; fp32 alone."""
    goes_on_n = _goes_on(starts, solved_BnKGCW.shape[1], solved_BnKGCW.device)
    return cast("tuple[Tensor, Tensor]", _Scan.apply(solved_BnKGCW, keys_BnKGCD, left_BnKG, goes_on_n))


@lru_cache(maxsize=64)
def _goes_on(starts: frozenset[int], num_chunks: int, device: torch.device) -> Tensor:
    """0 for chunks that begin with a state of zeros, else 1. Made once, as a CUDA graph takes no copy from the host."""
    return torch.tensor([float(chunk not in starts) for chunk in range(num_chunks)], device=device)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, solved: Tensor, keys: Tensor, left: Tensor, goes_on: Tensor) -> tuple[Tensor, Tensor]:
        solved, keys, left = solved.contiguous(), keys.contiguous(), left.contiguous()
        width = solved.shape[-1] - keys.shape[-1]
        states = solved.new_empty((*keys.shape[:4], keys.shape[-1], width))
        corrections = solved.new_empty((*solved.shape[:5], width))
        grid, sizes, tiles = _shape(keys, width)
        _forward[grid](solved, keys, left, goes_on, states, corrections, *sizes, *tiles, **_OPTIONS)
        ctx.save_for_backward(solved, keys, left, goes_on, states, corrections)
        return states, corrections

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_states: Tensor, grad_corrections: Tensor) -> tuple[Tensor | None, ...]:
        solved, keys, left, goes_on, states, corrections = ctx.saved_tensors
        grad_states, grad_corrections = grad_states.contiguous(), grad_corrections.contiguous()
        grad_ends, grad_own = torch.empty_like(states), torch.empty_like(corrections)
        grid, sizes, tiles = _shape(keys, states.shape[-1])
        _backward[grid](
            solved, keys, left, goes_on, grad_states, grad_corrections, grad_ends, grad_own, *sizes, *tiles, **_OPTIONS
        )
        grad_solved = torch.cat([grad_own, -(grad_own @ states.mT)], -1)
        return grad_solved, corrections @ grad_ends.mT, torch.linalg.vecdot(grad_ends, states).sum(-1), None


def _shape(keys: Tensor, width: int) -> tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]]:
    """Programs, sizes and tiles."""
    batch, num_chunks, key_heads, share, size, channels = keys.shape
    block_c, block_d, block_e = (max(_SMALLEST_SIDE, int(triton.next_power_of_2(x))) for x in (size, channels, width))
    block_e = min(_MAX_COLUMNS, block_e)
    heads = key_heads * share
    grid = batch * heads, triton.cdiv(width, block_e)
    return grid, (num_chunks, heads, size, channels, width), (block_c, block_d, block_e)
