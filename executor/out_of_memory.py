"""What a rank says that ran out of memory: how much it held, of what, and how much more it wanted."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moeplan.errors import OutOfMemoryError
from moeplan.executor.measure import peak_device_bytes
from moeplan.executor.measurement import memory_by_category
from moeplan.executor.train import Trainer
from moeplan.units import GIB, KIB, MIB, format_bytes

_ASKED = re.compile(r"Tried to allocate ([\d.]+) (GiB|MiB|KiB|bytes)")
_UNITS = {"GiB": GIB, "MiB": MIB, "KiB": KIB, "bytes": 1}
HINT = "lower mbs or seq_len, or add recompute or offload"


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that a GPU or the host has no more memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)


def out_of_memory(error: Exception, rank: int, trainer: Trainer, taken_before_bytes: float) -> OutOfMemoryError:
    """The error of a rank whose ``trainer`` met ``error``: its peak by category, activations with what was asked for.

    ``taken_before_bytes``: in use before the model was built.
    """
    memory = memory_by_category(trainer, peak_device_bytes(trainer.device), taken_before_bytes)
    memory["activations"] += _asked_bytes(str(error))
    parts = ", ".join(f"{category} {format_bytes(num_bytes)}" for category, num_bytes in memory.items())
    message = f"rank {rank} ran out of memory: it needed at least {format_bytes(sum(memory.values()))} ({parts})"
    return OutOfMemoryError(message, HINT, {str(category): num_bytes for category, num_bytes in memory.items()})


@contextmanager
def memory_explained(rank: int, trainer: Trainer, taken_before_bytes: float) -> Iterator[None]:
    """Raise :func:`out_of_memory` for an error inside that says so."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(error, rank, trainer, taken_before_bytes) from error
        raise


def _asked_bytes(text: str) -> float:
    """What the allocation that failed asked for; 0 where the error does not say."""
    found = _ASKED.search(text)
    return float(found[1]) * _UNITS[found[2]] if found else 0.0
