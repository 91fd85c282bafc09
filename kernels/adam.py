"""One Adam step with decoupled weight decay over flat buffers.

Shapes: N elements.
"""
# ruff: noqa: N815 - shape suffixes

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeplan.kernels import adam_torch
from moeplan.kernels.remainders import join, split_
from moeplan.kernels.triton_choice import default_backend

# Elements joined at once where a back end cannot in its own kernel: an fp32 copy of 64 MiB.
STRETCH = 2**24


@dataclass(frozen=True, slots=True)
class AdamState:
    """What a step reads and writes, all [N] and contiguous, and the number of this step (counted from 1, a scalar).

    ``weight_N``: where the new weights go as well, in the type of the model; None where ``main_N`` are the weights.
    ``remainder_N``: int16 that ``main_N``, the bf16 weights of the model then, lacks of fp32 main weights
    (:mod:`moeplan.kernels.remainders`).
    """

    main_N: Tensor
    grad_N: Tensor
    first_N: Tensor
    second_N: Tensor
    num_steps: Tensor
    weight_N: Tensor | None = None
    remainder_N: Tensor | None = None

    def __post_init__(self) -> None:
        is_half = self.main_N.dtype == torch.bfloat16 and self.weight_N is None
        assert self.remainder_N is None or is_half, (self.main_N.dtype, self.weight_N)


@dataclass(frozen=True, slots=True)
class AdamOptions:
    """Settings of one step; gradients are multiplied by ``grad_scale`` as they are read."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float = 1.0


class Adam(Protocol):
    """A back end: :func:`adam_`."""

    def __call__(self, state: AdamState, options: AdamOptions) -> None: ...


def _triton() -> Adam:
    from moeplan.kernels import adam_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

    return adam_triton.adam_


@torch.no_grad()
def adam_reference_(state: AdamState, options: AdamOptions) -> None:
    """:func:`adam_` as its formula says: any device and dtype, a copy of everything."""
    dtype, steps = state.main_N.dtype, float(state.num_steps)
    grad_N = state.grad_N.to(dtype) * options.grad_scale
    first_N = options.beta1 * state.first_N.to(dtype) + (1 - options.beta1) * grad_N
    second_N = options.beta2 * state.second_N.to(dtype) + (1 - options.beta2) * grad_N.square()
    change_N = first_N / (1 - options.beta1**steps)
    change_N /= (second_N / (1 - options.beta2**steps)).sqrt() + options.eps
    state.main_N.sub_(options.lr * (options.weight_decay * state.main_N + change_N))
    state.first_N.copy_(first_N)
    state.second_N.copy_(second_N)
    if state.weight_N is not None:
        state.weight_N.copy_(state.main_N)


def _joining(step: Adam) -> Adam:
    """A back end of whole main weights for halves too."""

    def adam_in_stretches_(state: AdamState, options: AdamOptions) -> None:
        if state.remainder_N is None:
            step(state, options)
            return
        for start in range(0, state.main_N.numel(), STRETCH):
            one = slice(start, start + STRETCH)
            main_N = join(state.main_N[one], state.remainder_N[one])
            flats = (main_N, state.grad_N[one], state.first_N[one], state.second_N[one])
            step(AdamState(*flats, state.num_steps), options)
            split_(main_N, state.main_N[one], state.remainder_N[one])

    return adam_in_stretches_


BACKENDS: dict[str, Callable[[], Adam]] = {
    "reference": lambda: _joining(adam_reference_),
    "torch": lambda: _joining(adam_torch.adam_),
    "triton": _triton,
}


def adam_(state: AdamState, options: AdamOptions, *, backend: str | None = None) -> None:
    """With g = grad * grad_scale: main -= lr * (weight_decay * main + m / c1 / (sqrt(v / c2) + eps)), in place.

    m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g**2, c = 1 - beta**num_steps. Moments may be kept in another
    type than ``main_N``, in which all is computed; in fp32 where that is in halves. The torch back end scales the
    gradients in place.
    """
    BACKENDS[backend or default_backend(state.main_N)]()(state, options)
