"""Main weights and moments of a stretch of a flat buffer, and where they are: on the device, on the host, or moving.

On a CPU device the host copies are copies like any other; only streams and pinned memory are missing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeplan.executor.dtypes import Dtypes
from moeplan.executor.flat_buffer import Span
from moeplan.executor.scopes import scope
from moeplan.kernels.adam import AdamOptions, AdamState, adam_


@dataclass(frozen=True)
class DecaySpan:
    """Elements with one weight decay, counted from the first that the optimizer updates."""

    span: Span
    weight_decay: float


class StatePart:
    """Adam with decoupled weight decay over ``span``, counted from the first element updated; all on the device.

    ``weights`` [elements] are what the model computes with; without main weights the updates are made in them.
    """

    def __init__(self, span: Span, weights: Tensor, dtypes: Dtypes) -> None:
        self.span, self.weights, self.has_main = span, weights, dtypes.has_main_weights
        self.main = weights.to(dtypes.main) if self.has_main else weights
        self.first, self.second = (torch.zeros_like(self.main, dtype=dtypes.moment) for _ in range(2))
        self.num_steps = torch.zeros((), device=weights.device)

    @property
    def flats(self) -> dict[str, Tensor]:
        """Each kind of state, where its values are now."""
        return {"weight": self.main, "first_moment": self.first, "second_moment": self.second}

    @property
    def device_bytes(self) -> int:
        """What the states take of the device's memory while layers run."""
        return self.main.nbytes * self.has_main + self.first.nbytes + self.second.nbytes

    def fetch(self) -> None:
        """Begin to bring here what waits on the host."""

    def send_away(self) -> None:
        """Back to the host with what was fetched for an update, made or left out."""

    def begin_loading(self) -> None:
        """Let :attr:`flats` be what is written to until :meth:`take_loaded`."""

    def take_loaded(self, num_steps: int) -> None:
        """Let the model's weights be those that were written into :attr:`flats`, after ``num_steps`` updates."""
        self.num_steps.fill_(num_steps)
        if self.has_main:
            self.weights.copy_(self.flats["weight"])

    def step(self, grads: Tensor, decays: Sequence[DecaySpan], options: AdamOptions) -> None:
        """One update by the gradients of everything that the optimizer updates."""
        self.num_steps += 1
        for span, decayed in cut_by_decay(decays, self.span, options):
            own = span.after(self.span.start)
            state = AdamState(
                own.inside(self.main),
                span.inside(grads),
                own.inside(self.first),
                own.inside(self.second),
                self.num_steps,
                own.inside(self.weights) if self.has_main else None,
            )
            adam_(state, decayed)


class Moving:
    """Tensors whose values wait on the host, without memory on the device, and come back on a stream of their own."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.is_here = list(tensors), True
        self.device = self.tensors[0].device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.host = [host_tensor(one) for one in self.tensors]

    def fetch(self) -> None:
        """Begin to bring them to the device."""
        if self.is_here:
            return
        for one, host in zip(self.tensors, self.host, strict=True):
            one.untyped_storage().resize_(host.nbytes)
        self._copy(self.tensors, self.host)
        self.is_here = True

    def wait(self) -> None:
        """Let what follows on the device find what is under way to it."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def send_away(self) -> None:
        """Copy them to the host and free their memory here."""
        if not self.is_here:
            return
        self._copy(self.host, self.tensors)
        for one in self.tensors:
            if self._stream is not None:
                one.record_stream(self._stream)  # its memory is free for others once the copy is made
            one.untyped_storage().resize_(0)
        self.is_here = False

    def wait_on_host(self) -> None:
        """Wait until what went away has arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with scope("optimizer"), torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)


class OffloadedPart(StatePart):
    """States wait on the host while layers run, and come back for the step (report section 1.2).

    ``moves_weights``: weights that are the main ones wait there as well. After a step all stay until they are sent
    away.
    """

    def __init__(self, span: Span, weights: Tensor, dtypes: Dtypes, *, moves_weights: bool = False) -> None:
        super().__init__(span, weights, dtypes)
        moments = (self.first, self.second)
        self.moves_main = self.has_main or moves_weights
        self.moving = Moving((self.main, *moments) if self.moves_main else moments)
        self.moving.send_away()

    @property
    def flats(self) -> dict[str, Tensor]:
        """Each kind of state, where its values are now."""
        if self.moving.is_here:
            return super().flats
        self.moving.wait_on_host()
        host = self.moving.host
        return {
            "weight": host[0] if self.moves_main else self.main,
            "first_moment": host[-2],
            "second_moment": host[-1],
        }

    @property
    def device_bytes(self) -> int:
        """None: the step itself has no activations beside it."""
        return 0

    def fetch(self) -> None:
        """Begin to bring the states to the device."""
        self.moving.fetch()

    def step(self, grads: Tensor, decays: Sequence[DecaySpan], options: AdamOptions) -> None:
        """Wait for the states and update."""
        self.fetch()
        self.moving.wait()
        super().step(grads, decays, options)

    def send_away(self) -> None:
        """Copy the states to the host and free their memory here."""
        self.moving.send_away()


class HostPart(StatePart):
    """Moments stay on the host and the update is made there; main weights are on both sides (report section 1.2)."""

    def __init__(self, span: Span, weights: Tensor, dtypes: Dtypes) -> None:
        super().__init__(span, weights, dtypes)
        self._host_main = host_tensor(self.main)
        self._host_main.copy_(self.main)
        self._host_grads = host_tensor(self.main)
        self.first, self.second = (host_tensor(moment).zero_() for moment in (self.first, self.second))
        self.num_steps = torch.zeros(())

    @property
    def flats(self) -> dict[str, Tensor]:
        """Each kind of state, on the host."""
        return {"weight": self._host_main, "first_moment": self.first, "second_moment": self.second}

    @property
    def device_bytes(self) -> int:
        """Main weights."""
        return self.main.nbytes * self.has_main

    def take_loaded(self, num_steps: int) -> None:
        """As :meth:`StatePart.take_loaded`."""
        super().take_loaded(num_steps)
        self.main.copy_(self._host_main)

    def step(self, grads: Tensor, decays: Sequence[DecaySpan], options: AdamOptions) -> None:
        """Gradients to the host, the update there, weights back."""
        self._host_grads.copy_(self.span.inside(grads))
        self.num_steps += 1
        for span, decayed in cut_by_decay(decays, self.span, options):
            own = span.after(self.span.start)
            state = AdamState(
                own.inside(self._host_main),
                own.inside(self._host_grads),
                own.inside(self.first),
                own.inside(self.second),
                self.num_steps,
            )
            adam_(state, decayed)
        self.main.copy_(self._host_main, non_blocking=True)
        if self.has_main:
            self.weights.copy_(self.main)


def host_tensor(like: Tensor) -> Tensor:
    """Room on the host for a copy, pinned beside a GPU so that copies need not wait for each other."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def cut_by_decay(decays: Sequence[DecaySpan], part: Span, options: AdamOptions) -> Iterator[tuple[Span, AdamOptions]]:
    """What of each span lies in a part, with the options of its update."""
    for one in decays:
        span = one.span.overlap(part)
        if span.size:
            yield span, replace(options, weight_decay=one.weight_decay)
