"""What stops a run whose numbers go wrong, naming step, rank and tensor.

All ranks know the same loss and norm, so all of them find the fault, and stop or go on, together.
"""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

import torch
from torch import Tensor

from moeplan.errors import RunFailedError
from moeplan.executor.collectives import gather_objects
from moeplan.executor.mesh import Group

# Gradient norms that a spike is judged by, and how many of them must be there first.
SPIKE_WINDOW, SPIKE_MIN_STEPS = 32, 8

NamedTensors = Iterable[tuple[str, Tensor]]


def check_finite(what: str, values: list[float], step: int, tensors: NamedTensors, world: Group) -> None:
    """Raise RunFailedError where the value of some rank is not finite. Collective over the world.

    ``values``: one for each rank, known to all. ``tensors``: this rank's, of which the first not finite is named
    with the lowest rank that has one.
    """
    bad = [(rank, value) for rank, value in enumerate(values) if not math.isfinite(value)]
    if not bad:
        return
    rank, value = bad[0]
    first = next((name for name, tensor in tensors if not bool(torch.isfinite(tensor).all())), "")
    found = gather_objects(first, world)
    where = ""
    if any(found):
        rank = next(rank for rank, name in enumerate(found) if name)
        where = f", first in {found[rank]}"
    raise RunFailedError(
        f"{what} is {value} at step {step} on rank {rank}{where}",
        "lower lr, lengthen lr_warmup_steps, or look at the data of that step",
    )


def largest_tensor(tensors: NamedTensors, world: Group) -> tuple[str, int]:
    """Name and rank of the tensor with the largest norm. Collective over the world."""
    norms = [(float(torch.linalg.vector_norm(tensor)), name) for name, tensor in tensors]
    ranked = gather_objects(max(norms, default=(0.0, "")), world)
    rank = max(range(len(ranked)), key=ranked.__getitem__)
    return ranked[rank][1], rank


class SpikeGuard:
    """Judges each step's gradient norm by the median of those before. ``factor`` 0: never."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._norms: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def excess(self, norm: float) -> float:
        """How many times the median a spike is; 0 for a step that is none, which then counts for later ones."""
        if self.factor > 0 and len(self._norms) >= SPIKE_MIN_STEPS and norm > self.factor * median(self._norms):
            return norm / median(self._norms)
        self._norms.append(norm)
        return 0.0
