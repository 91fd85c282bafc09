"""Activation recompute: whole modules by checkpointing, cheap ones by dropping only their output.

An output that only its consumers keep is dropped after them and made again, from inputs kept anyway, when the first
of their gradients asks for it (report section 1.6). No part of a consumer runs twice.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

from moeplan.executor.saved_tensors import Restore, keeping, kept, storage_key

ResultT = TypeVar("ResultT")


class _Checkpoint(Function):
    """What torch.utils.checkpoint does for one output, which would load the compiler: 145 MiB a process."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in ctx.saved_tensors
        ]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        torch.autograd.backward(output, grads[0])
        return None, *(None if tensor is None else tensor.grad for tensor in inputs)


def checkpointed(function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """``function(*inputs)``, keeping only its inputs; backward runs all of it again, its communication as well.

    At least one input must require a gradient. Parameters that ``function`` uses get theirs in that second run.
    """
    return cast("Tensor", _Checkpoint.apply(function, *inputs))


class _Dropped:
    """Outputs to be made again. The copies live from the first to the last gradient that asks for them."""

    def __init__(self, produce: Callable[..., tuple[Tensor, ...]], inputs: tuple[Restore, ...]) -> None:
        self._produce, self._inputs = produce, inputs
        self._made: tuple[Tensor, ...] | None = None
        self._waiting = 0

    def register(self) -> None:
        self._waiting += 1

    def take(self, index: int, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A view of output ``index``."""
        if self._made is None:
            with torch.no_grad():
                self._made = self._produce(*(restore() for restore in self._inputs))
        output = self._made[index]
        self._waiting -= 1
        if self._waiting <= 0:
            self._made = None
        return output.as_strided(size, stride, offset)


def dropping_output(
    produce: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], consume: Callable[..., ResultT]
) -> ResultT:
    """``consume(*produce(*inputs))`` without keeping what ``produce`` returned for backward.

    ``consume`` must be all that uses those outputs, and ``inputs`` should be kept for backward anyway.
    """
    return dropping(produce(*inputs), produce, inputs, consume)


def dropping(
    outputs: tuple[Tensor, ...],
    produce: Callable[..., tuple[Tensor, ...]],
    inputs: tuple[Tensor, ...],
    consume: Callable[..., ResultT],
) -> ResultT:
    """:func:`dropping_output` of ``outputs`` that are there already; ``produce(*inputs)`` makes them again."""
    dropped = _Dropped(produce, tuple(map(kept, inputs)))
    # By type as well: a view as another type has another stride. No hook may hold the outputs themselves.
    places = {(storage_key(output), output.dtype): index for index, output in enumerate(outputs)}

    def keeper(tensor: Tensor) -> Restore | None:
        index = places.get((storage_key(tensor), tensor.dtype))
        if index is None:
            return None
        dropped.register()
        return partial(dropped.take, index, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    with keeping(keeper, drops=True):
        return consume(*outputs)
