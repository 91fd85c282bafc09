"""Offsets of experts on the host, read once for each tensor of them.

Shapes: E experts.
"""

from typing import cast

from torch import Tensor

_ATTRIBUTE = "host_offsets"


def host_offsets(offsets_E: Tensor) -> tuple[int, ...]:
    """Where the rows of each expert end. Waits for the device the first time that a tensor is asked for."""
    known = getattr(offsets_E, _ATTRIBUTE, None)
    if known is None:
        known = tuple(offsets_E.tolist())
        setattr(offsets_E, _ATTRIBUTE, known)
    return cast("tuple[int, ...]", known)
