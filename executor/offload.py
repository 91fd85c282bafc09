"""Activation offload: what layers keep for backward waits in host memory (report section 1.6).

A tensor's copy to the host starts as soon as it is saved. Its device memory goes when the layer after the next one
begins, so that a layer of compute hides the copy and what is needed first in backward never left. There tensors come
back in groups (what one module of one layer sent, or a whole layer), about one layer ahead of their use.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import local
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from moeplan.executor.host_buffers import HostBuffers, ParkedStorage
from moeplan.executor.saved_tensors import Restore, is_parameter, keeping, storage_key
from moeplan.plan import Plan
from moeplan.vocabulary import OffloadModule

MIN_BYTES = 1 << 20  # smaller tensors are not worth a copy each (report section 1.6 names a million elements)
_FUSED: frozenset[OffloadModule] = frozenset(("expert_fc1", "moe_act"))


class _Active(local):
    """The offloader whose chunk runs forward in this thread: modules ask it, and what backward runs again does not."""

    offloader: "Offloader | None" = None


_active = _Active()


def offloading(
    module: OffloadModule, *inputs: Tensor, rest: OffloadModule | None = None
) -> AbstractContextManager[None]:
    """Send the ``inputs`` of ``module`` to the host where it, run inside, saves them and the plan says so.

    ``rest``: the module whose offload takes all else that is saved inside.
    """
    offloader = _active.offloader
    if offloader is None or module not in offloader.modules:
        return nullcontext()
    return offloader.sending(None if rest in offloader.modules else inputs)


class _Group:
    """Storages that were sent together, and the group before them in the same chunk. Saved tensors alone hold them."""

    def __init__(self, before: "_Group | None") -> None:
        self.before = before
        self.parked: list[ref[ParkedStorage]] = []

    def call_back(self, num_groups: int) -> None:
        """Start the way back of ``num_groups`` groups, this one first."""
        group: _Group | None = self
        for _ in range(num_groups):
            if group is None:
                return
            for parked in reversed(group.parked):
                alive = parked()
                if alive is not None:
                    alive.fetch()
            group = group.before


class Offloader:
    """Offload of one pipeline rank, as its plan has it; ``model`` are the parameters and tables, which stay.

    Chunks (a micro-batch in a stage) go forward one after the other.
    """

    def __init__(self, plan: Plan, model: nn.Module, num_layers: int, device: torch.device) -> None:
        modules = frozenset(plan.offload_modules)
        self.modules = modules | _FUSED if "fused_group_mlp" in modules else modules
        self.num_whole_layers = min(plan.offload_layers, max(num_layers - 1, 0))
        self.buffers = HostBuffers(device)
        self._model = model
        self._persistent: frozenset[int] = frozenset()
        self._last: _Group | None = None
        # What is still on the device as well, of the last layer and the one before.
        self._held: list[WeakValueDictionary[int, ParkedStorage]] = []
        self._lookahead = max(1, len(self.modules) - 1)

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Around the forward of one micro-batch in one stage."""
        self._persistent = frozenset(map(storage_key, tensors_of(self._model)))
        self._last, _active.offloader = None, self
        try:
            yield
        finally:
            _active.offloader = None

    def run_layer(self, index: int, layer: Callable[[Tensor], Tensor], x_LH: Tensor) -> Tensor:
        """``layer(x_LH)`` of layer ``index`` of this rank, with what it keeps sent where it should wait."""
        self._begin_layer()
        with self.sending(None) if index < self.num_whole_layers else nullcontext():
            out_LH = layer(x_LH)
        if self._last is not None and out_LH.requires_grad and any(map(len, self._held)):
            # Called when backward reaches this layer, where nothing after it calls tensors back.
            out_LH.register_hook(partial(_call_back, self._last, self._lookahead))
        return out_LH

    @contextmanager
    def sending(self, inputs: tuple[Tensor, ...] | None) -> Iterator[None]:
        """Send what is saved inside: storages of ``inputs``, or all."""
        group = _Group(self._last)
        # Others keep what else lies in the storage of a mere view: sending that would free nothing.
        wanted = None if inputs is None else {storage_key(one) for one in inputs if _covers_storage(one)}

        def keeper(tensor: Tensor) -> Restore | None:
            key = storage_key(tensor)
            if (wanted is not None and key not in wanted) or not self._is_sent(tensor):
                return None
            held = next((layer[key] for layer in self._held if key in layer), None)
            if held is None:
                held = self._held[-1][key] = ParkedStorage(tensor, self.buffers)
                group.parked.append(ref(held))
            return partial(self._restored, group, held, *_place(tensor))

        with keeping(keeper):
            yield
        if group.parked:
            self._last = group

    def _is_sent(self, tensor: Tensor) -> bool:
        return (
            tensor.untyped_storage().nbytes() >= MIN_BYTES
            and tensor.device == self.buffers.device
            and storage_key(tensor) not in self._persistent
            and not is_parameter(tensor)  # under full sharding their storages come and go
        )

    def _restored(self, group: _Group, parked: ParkedStorage, *place: Any) -> Tensor:
        view = parked.view(*place)
        if group.before is not None:
            group.before.call_back(self._lookahead)
        return view

    def _begin_layer(self) -> None:
        """Let go of the layer before the last one."""
        while len(self._held) > 1:
            for parked in list(self._held.pop(0).values()):
                parked.leave()
        self._held.append(WeakValueDictionary())


def _call_back(group: _Group, num_groups: int, _grad: Tensor) -> None:
    group.call_back(num_groups)


def _covers_storage(tensor: Tensor) -> bool:
    """Whether nothing else lies in the tensor's storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _place(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...], int]:
    return tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters of a model, and tensors that its modules hold beside them."""
    yield from model.parameters()
    for module in model.modules():
        yield from _tensors_in(tuple(vars(module).values()))


def _tensors_in(values: tuple[object, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors_in(value)
