"""Optimizer states in fewer bits on the host: between steps, or with the update itself (report section 1.2)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from moeplan.executor.dtypes import Dtypes
from moeplan.executor.flat_buffer import Span
from moeplan.executor.optimizer_state import DecaySpan, Moving, StatePart, host_tensor
from moeplan.executor.packed_states import Packed, PackedPart, PlainValues, Remainders, chunks
from moeplan.kernels.adam import AdamOptions


class OffloadedPackedPart(PackedPart):
    """States of fewer bits wait on the host while layers run, as :class:`OffloadedPart` has them."""

    def __init__(
        self, span: Span, weights: Tensor, dtypes: Dtypes, *, has_remainders: bool, moves_weights: bool = False
    ) -> None:
        super().__init__(span, weights, dtypes, has_remainders=has_remainders)
        self.moving = Moving((weights, *self.own) if moves_weights else self.own)
        self.moving.send_away()

    @property
    def flats(self) -> dict[str, Tensor]:
        """Each kind of state, unpacked on the device and brought to the host one after the other."""
        if self._loading is not None:
            return self._loading
        everything, names = Span(0, self.span.size), ("weight", "first_moment", "second_moment")
        with self._here():
            return {
                name: one.unpack(everything).to("cpu", copy=True) for name, one in zip(names, self.states, strict=True)
            }

    @property
    def device_bytes(self) -> int:
        """None while layers run."""
        return 0

    def fetch(self) -> None:
        """Begin to bring the states to the device."""
        self.moving.fetch()

    def send_away(self) -> None:
        """Back to the host."""
        self.moving.send_away()

    @contextmanager
    def _here(self) -> Iterator[None]:
        self.fetch()
        self.moving.wait()
        yield
        self.send_away()

    def take_loaded(self, num_steps: int) -> None:
        """As :meth:`StatePart.take_loaded`."""
        with self._here():
            super().take_loaded(num_steps)

    def step(self, grads: Tensor, decays: Sequence[DecaySpan], options: AdamOptions) -> None:
        """Wait for the states and update."""
        self.fetch()
        self.moving.wait()
        super().step(grads, decays, options)


class PackedHostPart(StatePart):
    """Moments stay on the host and the update is made there; of main weights the device keeps what packed states do."""

    def __init__(self, span: Span, weights: Tensor, dtypes: Dtypes, *, has_remainders: bool) -> None:
        super().__init__(span, weights, dtypes)
        self.on_device: Packed = Remainders(weights) if has_remainders else PlainValues(self.main)
        self.has_remainders = has_remainders
        self._host_main = host_tensor(self.main)
        self._host_main.copy_(self.main)
        self._host_grads = host_tensor(self.main)
        self.main = self.first = self.second = torch.empty(0)
        on_host = replace(dtypes, has_main_weights=False)
        self.on_host = PackedPart(Span(0, span.size), self._host_main, on_host, has_remainders=False)

    @property
    def flats(self) -> dict[str, Tensor]:
        """Each kind of state, unpacked on the host."""
        return self.on_host.flats

    @property
    def device_bytes(self) -> int:
        """Main weights, or what is left of their bits."""
        return sum(one.nbytes for one in self.on_device.tensors) * self.has_main

    def begin_loading(self) -> None:
        """As :meth:`PackedPart.begin_loading`."""
        self.on_host.begin_loading()

    def take_loaded(self, num_steps: int) -> None:
        """As :meth:`StatePart.take_loaded`."""
        self.on_host.take_loaded(num_steps)
        self._bring()

    def step(self, grads: Tensor, decays: Sequence[DecaySpan], options: AdamOptions) -> None:
        """Gradients to the host, the update there, weights back."""
        self._host_grads.copy_(self.span.inside(grads))
        own = [DecaySpan(one.span.overlap(self.span).after(self.span.start), one.weight_decay) for one in decays]
        self.on_host.step(self._host_grads, own, options)
        self._bring()

    def _bring(self) -> None:
        for chunk in chunks(self.span.size):
            main = chunk.inside(self._host_main).to(self.weights.device)
            self.on_device.pack(chunk, main)
            if self.has_main and not self.has_remainders:
                chunk.inside(self.weights).copy_(main)
