"""Who keeps the tensors that autograd saves for backward: keepers one inside the other, each taking what it knows.

torch's saved_tensors_hooks show a tensor to the innermost hooks alone; here what one keeper leaves goes on to the next.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# A function that gives a taken tensor back in backward, as often as asked; None where the keeper leaves it.
Restore = Callable[[], Tensor]
Keeper = Callable[[Tensor], Restore | None]


class _Active(threading.local):
    """Keepers of this thread, those that are asked first in front; autograd's own threads start with none."""

    keepers: tuple[tuple[bool, Keeper], ...] = ()


_active = _Active()


@contextmanager
def keeping(keeper: Keeper, *, drops: bool = False) -> Iterator[None]:
    """Ask ``keeper`` for every tensor saved inside, before the keepers outside.

    ``drops``: it makes its tensors again instead of storing them, so it is asked before all that store.
    """
    outer = _active.keepers
    _active.keepers = tuple(sorted(((drops, keeper), *outer), key=lambda entry: not entry[0]))
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _active.keepers = outer


def kept(tensor: Tensor) -> Restore:
    """Keep a tensor for backward as autograd would do it here; the result lives as long as the caller holds it."""
    packed = _pack(tensor)
    return (lambda: packed) if isinstance(packed, Tensor) else cast("Restore", packed)


def storage_key(tensor: Tensor) -> int:
    """Address of the tensor's storage: unique among live storages, 0 where it is empty."""
    return tensor.untyped_storage().data_ptr()


def is_parameter(tensor: Tensor) -> bool:
    """Whether the tensor is a parameter or a view of one."""
    return any(isinstance(one, nn.Parameter) for one in (tensor, tensor._base))  # noqa: SLF001 - of a view


def _pack(tensor: Tensor) -> Any:
    for _, keeper in _active.keepers:
        restore = keeper(tensor)
        if restore is not None:
            return restore
    # An output kept as it is would hold the node that keeps it: a graph without a backward would never go.
    return tensor if tensor.grad_fn is None else tensor.detach()


def _unpack(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()
