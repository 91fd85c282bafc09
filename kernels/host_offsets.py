"""Offsets of experts on the host, read once for each tensor of them.

Shapes: E experts.
"""
# ruff: noqa: N815 - shape suffixes

from dataclasses import dataclass

import torch
from torch import Tensor

_ATTRIBUTE = "host_offsets"


@dataclass(slots=True)
class _Copy:
    """Offsets on their way to the host, in pinned memory; ``arrived`` is recorded behind them."""

    offsets_E: Tensor
    arrived: torch.cuda.Event

    def wait(self) -> tuple[int, ...]:
        self.arrived.synchronize()
        return tuple(self.offsets_E.tolist())


def start_host_copy(offsets_E: Tensor) -> None:
    """Send offsets that will be asked for later, so that asking then waits for nothing. Nothing to do on a CPU."""
    if not offsets_E.is_cuda or hasattr(offsets_E, _ATTRIBUTE):
        return
    pinned_E = torch.empty(offsets_E.shape, dtype=offsets_E.dtype, pin_memory=True)
    arrived = torch.cuda.Event()
    pinned_E.copy_(offsets_E, non_blocking=True)
    arrived.record()
    setattr(offsets_E, _ATTRIBUTE, _Copy(pinned_E, arrived))


def host_offsets(offsets_E: Tensor) -> tuple[int, ...]:
    """Where the rows of each expert end. Waits for the device the first time that a tensor is asked for.

    After :func:`start_host_copy` it waits for no more than that copy.
    """
    known: tuple[int, ...] | _Copy | None = getattr(offsets_E, _ATTRIBUTE, None)
    if not isinstance(known, tuple):
        known = tuple(offsets_E.tolist()) if known is None else known.wait()
        setattr(offsets_E, _ATTRIBUTE, known)
    return known
