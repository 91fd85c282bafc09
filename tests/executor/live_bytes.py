"""Bytes of the storages that operations make and that are alive at once: what an allocator would have to hold."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages made inside it; ``peak_bytes`` since it began or since :meth:`forget_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def forget_peak(self) -> None:
        """Begin to look for the peak anew."""
        self.peak_bytes = self.now_bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if not address or address in self._alive:
            return
        self._alive.add(address)
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, partial(self._gone, address, size))

    def _gone(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self.now_bytes -= size
