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
from moeplan.kernels.triton_choice import default_backend


@dataclass(frozen=True, slots=True)
class AdamState:
    """What a step reads and writes, all [N] and contiguous, and the number of this step (counted from 1, a scalar).

    ``weight_N``: where the new weights go as well, in the type of the model; None where ``main_N`` are the weights.
    """

    main_N: Tensor
    grad_N: Tensor
    first_N: Tensor
    second_N: Tensor
    num_steps: Tensor
    weight_N: Tensor | None = None


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


BACKENDS: dict[str, Callable[[], Adam]] = {
    "reference": lambda: adam_reference_,
    "torch": lambda: adam_torch.adam_,
    "triton": _triton,
}


def adam_(state: AdamState, options: AdamOptions, *, backend: str | None = None) -> None:
    """With g = grad * grad_scale: main -= lr * (weight_decay * main + m / c1 / (sqrt(v / c2) + eps)), in place.

    m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g**2, c = 1 - beta**num_steps. Moments may be kept in another
    type than ``main_N``, in which all is computed. The torch back end scales the gradients in place.
    """
    BACKENDS[backend or default_backend(state.main_N)]()(state, options)
