"""Adam in one pass: each of main weights, gradients and moments is read once, and the 16-bit weights are written along.

30 bytes a parameter with fp32 moments and bf16 weights, where scaling, torch's step and a copy take 42; 28 where the
main weights are those weights and their remainders, joined and split in registers (:mod:`moeplan.kernels.remainders`).

Shapes: N elements.
"""
# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes by position, and reads every annotation as a constant
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from moeplan.kernels.triton_launch import compute_dtype

if TYPE_CHECKING:
    from moeplan.kernels.adam import AdamOptions, AdamState

_BLOCK = 2048
_WORD = 8  # elements: 16 bytes of bf16. Known to divide the number of elements, it lets 16 bytes move at once


@triton.jit
def _step(
    main_ptr,
    grad_ptr,
    first_ptr,
    second_ptr,
    weight_ptr,
    remainder_ptr,
    corrections_ptr,
    num_words,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    grad_scale,
    HAS_WEIGHT: tl.constexpr,
    HAS_REMAINDER: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Words are counted in 32 bits, elements of a large model are not.
    mask = place < num_words * tl.full((), WORD, tl.int64)
    main = tl.load(main_ptr + place, mask, 0)
    if HAS_REMAINDER:
        left = tl.load(remainder_ptr + place, mask, 0).to(tl.int32)
        main = ((main.to(tl.int32) << 16) + left).to(tl.float32, bitcast=True)
    main = main.to(DTYPE)
    grad = tl.load(grad_ptr + place, mask, 0).to(DTYPE) * grad_scale
    first = tl.load(first_ptr + place, mask, 0).to(DTYPE)
    second = tl.load(second_ptr + place, mask, 0).to(DTYPE)
    first += (1 - beta1) * (grad - first)
    second += (1 - beta2) * (grad * grad - second)
    correction1 = tl.load(corrections_ptr).to(DTYPE)
    correction2 = tl.load(corrections_ptr + 1).to(DTYPE)
    change = first / correction1 / (tl.sqrt(second / correction2) + eps)
    main -= lr * (weight_decay * main + change)
    if HAS_REMAINDER:
        bits = main.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(main_ptr + place, high.to(tl.int16), mask)
        tl.store(remainder_ptr + place, (bits - (high << 16)).to(tl.int16), mask)
    else:
        tl.store(main_ptr + place, main, mask)
    tl.store(first_ptr + place, first.to(first_ptr.dtype.element_ty), mask)
    tl.store(second_ptr + place, second.to(second_ptr.dtype.element_ty), mask)
    if HAS_WEIGHT:
        tl.store(weight_ptr + place, main.to(weight_ptr.dtype.element_ty), mask)


def adam_(state: "AdamState", options: "AdamOptions") -> None:
    """See :func:`moeplan.kernels.adam.adam_`."""
    num_elements = state.main_N.numel()
    if not num_elements:
        return
    num_steps = state.num_steps.to(torch.float64)
    corrections = torch.stack([1 - torch.pow(options.beta1, num_steps), 1 - torch.pow(options.beta2, num_steps)])
    word = 1 if num_elements % _WORD else _WORD
    has_remainder = state.remainder_N is not None
    main_N = state.main_N.view(torch.int16) if has_remainder else state.main_N
    weight_N = main_N if state.weight_N is None else state.weight_N
    remainder_N = main_N if state.remainder_N is None else state.remainder_N
    _step[triton.cdiv(num_elements, _BLOCK),](
        main_N, state.grad_N, state.first_N, state.second_N, weight_N, remainder_N, corrections, num_elements // word,
        options.lr, options.beta1, options.beta2, options.eps, options.weight_decay, options.grad_scale,
        state.weight_N is not None, has_remainder, compute_dtype(state.main_N), word, _BLOCK,
    )  # fmt: skip
