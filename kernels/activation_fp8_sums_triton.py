"""What activations of expert MLPs in FP8 are made of, and their first pass, which finds the largest magnitude.

It stores none of the numbers. Backward's sums the gradients of probabilities as well.

Shapes: R rows, F width after the activation, G width before it: 2F (gate, then up) for gated kinds, else F.
"""
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeplan.kernels.activation_triton import _CODES, _GATED, _act, _act_slope
from moeplan.kernels.triton_launch import block_of

# Rows and columns of a program, and its warps: of 10 blocks the fastest on one H200, 131,072 rows of 768 both ways.
_ROWS, _COLS, _WARPS = 8, 128, 4


@triton.jit
def bf16(x):
    """Numbers in fp32 rounded to those of bf16."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def gate_and_up(place, F, mask, GATED: tl.constexpr):
    """Both in fp32; of kinds without a gate the one input, twice."""
    gate = tl.load(place, mask, 0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(place + F, mask, 0).to(tl.float32)
    return gate, up


@triton.jit
def probs(place, is_row, HAS_PROBS: tl.constexpr):
    """A probability a row, [ROWS, 1]."""
    if HAS_PROBS:
        return tl.load(place, is_row, 0).to(tl.float32)[:, None]
    return tl.full((is_row.shape[0], 1), 1.0, tl.float32)


@triton.jit
def activated(gate, up, CODE: tl.constexpr, GATED: tl.constexpr):
    """The activation in fp32, before a row's probability."""
    y = _act(gate, CODE)
    if GATED:
        y *= up
    return y


@triton.jit
def slopes(grad, gate, up, prob, CODE: tl.constexpr, GATED: tl.constexpr):
    """Gradients of gate and up; for kinds without a gate the first is that of the input."""
    weighted = grad * prob
    grad_up = weighted * _act(gate, CODE)
    if GATED:
        weighted *= up
    return weighted * _act_slope(gate, CODE), grad_up


@triton.jit
def _rows_of_program(R, ROWS: tl.constexpr):
    """A program's first row, its rows from there on, and which of them there are."""
    first, rows = tl.program_id(0).to(tl.int64) * ROWS, tl.arange(0, ROWS)
    return first, rows, first + rows < R


@triton.jit
def _places(ptr, first, rows, width):
    """Where rows of a tensor begin; those beside each other are told apart in 32 bits."""
    return ptr + first * width + (rows * width)[:, None]


@triton.jit(do_not_specialize=["R"])
def _forward_amax(
    x_ptr, probs_ptr, amax_ptr, R, F,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    G = F * (2 if GATED else 1)
    first, rows, is_row = _rows_of_program(R, ROWS)
    place = _places(x_ptr, first, rows, G)
    highest = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, F, COLS):
        cols = (start + tl.arange(0, COLS))[None, :]
        gate, up = gate_and_up(place + cols, F, is_row[:, None] & (cols < F), GATED)
        highest = tl.maximum(highest, tl.abs(activated(gate, up, CODE, GATED)))
    # Neither a row's probability nor rounding changes which magnitude is the largest: once a row, not once an element.
    of_rows = tl.max(highest, 1)[:, None] * tl.abs(probs(probs_ptr + first + rows, is_row, HAS_PROBS))
    tl.store(amax_ptr + tl.program_id(0), bf16(tl.max(tl.max(of_rows, 1), 0)))


@triton.jit(do_not_specialize=["R"])
def _backward_sums(
    grad_ptr, x_ptr, probs_ptr, grad_probs_ptr, amax_ptr, R, F,
    CODE: tl.constexpr, GATED: tl.constexpr, HAS_PROBS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    G = F * (2 if GATED else 1)
    first, rows, is_row = _rows_of_program(R, ROWS)
    place, grad_place = _places(x_ptr, first, rows, G), _places(grad_ptr, first, rows, F)
    prob = probs(probs_ptr + first + rows, is_row, HAS_PROBS)
    grad_prob = tl.zeros((ROWS, COLS), tl.float32)
    highest = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, F, COLS):
        cols = (start + tl.arange(0, COLS))[None, :]
        mask = is_row[:, None] & (cols < F)
        gate, up = gate_and_up(place + cols, F, mask, GATED)
        grad = tl.load(grad_place + cols, mask, 0).to(tl.float32)
        grad_gate, grad_up = slopes(grad, gate, up, prob, CODE, GATED)
        highest = tl.maximum(highest, tl.abs(grad_gate))
        if GATED:
            highest = tl.maximum(highest, tl.abs(grad_up))
        grad_prob += grad * activated(gate, up, CODE, GATED)
    tl.store(amax_ptr + tl.program_id(0), bf16(tl.max(tl.max(highest, 1), 0)))
    if HAS_PROBS:
        sums = tl.sum(grad_prob, 1).to(grad_probs_ptr.dtype.element_ty)
        tl.store(grad_probs_ptr + first + rows, sums, is_row)


def width_of(x_RG: Tensor, kind: str) -> int:
    """F."""
    return x_RG.shape[1] // (2 if kind in _GATED else 1)


def forward_amax(x_RG: Tensor, kind: str, probs_R: Tensor | None) -> Tensor:
    """The largest magnitudes of parts of act(x), times ``probs_R`` where given: fp32, on the device."""
    amax_N, block = _blocks(x_RG, kind)
    _forward_amax[len(amax_N),](
        x_RG, x_RG if probs_R is None else probs_R, amax_N, len(x_RG), width_of(x_RG, kind), _CODES[kind],
        kind in _GATED, probs_R is not None, *block, num_warps=_WARPS,
    )  # fmt: skip
    return amax_N


def backward_sums(grad_RF: Tensor, x_RG: Tensor, kind: str, probs_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The largest magnitudes of parts of the gradient of x, and the gradients of the probabilities."""
    amax_N, block = _blocks(x_RG, kind)
    grad_probs_R = None if probs_R is None else torch.empty_like(probs_R)
    _backward_sums[len(amax_N),](
        grad_RF, x_RG, x_RG if probs_R is None else probs_R, amax_N if grad_probs_R is None else grad_probs_R, amax_N,
        len(x_RG), width_of(x_RG, kind), _CODES[kind], kind in _GATED, probs_R is not None, *block, num_warps=_WARPS,
    )  # fmt: skip
    return amax_N, grad_probs_R


def _blocks(x_RG: Tensor, kind: str) -> tuple[Tensor, tuple[int, int]]:
    """Room for the magnitude that each program finds, and what it takes."""
    num_programs = triton.cdiv(len(x_RG), _ROWS)
    return torch.empty(num_programs, device=x_RG.device), (_ROWS, min(_COLS, block_of(width_of(x_RG, kind))))
