"""Optimizer states in fewer bits (report section 1.2).

Main weights may keep only the 16 bits that their bf16 weights lack; Adam joins and splits them as it goes. FP8 moments
are unpacked, updated and packed again a stretch at a time. They have a scale for every 128 elements; the second is
stored as its root, which halves its range in powers of two, and is never rounded down to zero.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from moeplan.executor.dtypes import Dtypes
from moeplan.executor.flat_buffer import Span
from moeplan.executor.optimizer_state import DecaySpan, StatePart, cut_by_decay
from moeplan.kernels.adam import AdamOptions, AdamState, adam_
from moeplan.kernels.remainders import join, split_

BLOCK = 128
E4M3_MAX, E4M3_LEAST = 448.0, 2.0**-9
LEAST_SCALE = torch.finfo(torch.float32).tiny
# Elements whose FP8 moments are unpacked at once: both in fp32 take 128 MiB. A multiple of BLOCK.
CHUNK = 2**24


class Packed(Protocol):
    """One kind of state of some elements. Spans begin at multiples of BLOCK."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is stored."""
        ...

    def unpack(self, span: Span) -> Tensor:
        """The values, to be read, or updated and packed."""
        ...

    def pack(self, span: Span, values: Tensor) -> None:
        """Store the values."""
        ...


class PlainValues:
    """Kept as they are."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.tensors = values, (values,)

    def unpack(self, span: Span) -> Tensor:
        """The values themselves."""
        return span.inside(self.values)

    def pack(self, span: Span, values: Tensor) -> None:
        """Nothing where they were updated in place."""
        target = span.inside(self.values)
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)


class Remainders:
    """fp32 values as bf16 ``weights``, rounded half up, and what is left of their bits: 16 bits with a sign."""

    def __init__(self, weights: Tensor) -> None:
        self.weights, self.left = weights, torch.zeros(weights.shape, dtype=torch.int16, device=weights.device)
        self.tensors = (self.left,)

    def unpack(self, span: Span) -> Tensor:
        """The fp32 values, exact."""
        return join(span.inside(self.weights), span.inside(self.left))

    def pack(self, span: Span, values: Tensor) -> None:
        """Also writes the weights."""
        split_(values, span.inside(self.weights), span.inside(self.left))


class Fp8Blocks:
    """E4M3 with an fp32 scale for each block; ``is_square``: values are at least 0 and stored as their roots."""

    def __init__(self, num_elements: int, device: torch.device, *, is_square: bool) -> None:
        self.codes = torch.zeros(num_elements, dtype=torch.uint8, device=device)
        self.scales = torch.ones(-(-num_elements // BLOCK), device=device)
        self.is_square, self.tensors = is_square, (self.codes, self.scales)

    def unpack(self, span: Span) -> Tensor:
        """The values in fp32."""
        values = span.inside(self.codes).view(torch.float8_e4m3fn).to(torch.float32) * self._scales(span)
        return values.square_() if self.is_square else values

    def pack(self, span: Span, values: Tensor) -> None:
        """Round to the nearest, but a square above zero up to the least there is."""
        values = values.to(torch.float32)
        roots = values.sqrt() if self.is_square else values
        padded = torch.nn.functional.pad(roots, (0, -span.size % BLOCK)).view(-1, BLOCK)
        largest = padded.abs().amax(1)
        blocks = slice(span.start // BLOCK, span.start // BLOCK + len(largest))
        # No gradient for hundreds of steps leaves moments near 1e-43, whose scale would be 0 and 0 / 0 no number.
        self.scales[blocks] = (largest / E4M3_MAX).clamp(min=LEAST_SCALE)
        scaled = (roots / self._scales(span)).clamp_(-E4M3_MAX, E4M3_MAX)
        if self.is_square:
            scaled = torch.where(roots > 0, scaled.clamp(min=E4M3_LEAST), scaled)
        span.inside(self.codes).copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8))

    def _scales(self, span: Span) -> Tensor:
        """The scale of each element."""
        blocks = self.scales[span.start // BLOCK : -(-span.end // BLOCK)]
        return blocks.repeat_interleave(BLOCK)[: span.size]


class PackedPart(StatePart):
    """Adam over states of fewer bits. ``has_remainders``: of the main weights; needs bf16 weights with such."""

    def __init__(self, span: Span, weights: Tensor, dtypes: Dtypes, *, has_remainders: bool) -> None:
        super().__init__(span, weights, dtypes)
        self.has_remainders, self.has_fp8_moments = has_remainders, dtypes.moment == torch.float8_e4m3fn
        self.states: tuple[Packed, Packed, Packed] = (
            Remainders(weights) if has_remainders else PlainValues(self.main),
            self._moment(self.first, is_square=False),
            self._moment(self.second, is_square=True),
        )
        self.main = self.first = self.second = torch.empty(0)
        self._loading: dict[str, Tensor] | None = None

    def _moment(self, zeros: Tensor, *, is_square: bool) -> Packed:
        if self.has_fp8_moments:
            return Fp8Blocks(zeros.numel(), zeros.device, is_square=is_square)
        return PlainValues(zeros)

    @property
    def flats(self) -> dict[str, Tensor]:
        """Each kind of state, unpacked."""
        if self._loading is not None:
            return self._loading
        everything = Span(0, self.span.size)
        names = ("weight", "first_moment", "second_moment")
        return {name: one.unpack(everything) for name, one in zip(names, self.states, strict=True)}

    @property
    def device_bytes(self) -> int:
        """What the states take of the device's memory."""
        return sum(one.nbytes for one in self.own)

    @property
    def own(self) -> tuple[Tensor, ...]:
        """What is stored here and nowhere else: not main weights that are the weights themselves."""
        main, first, second = self.states
        return (*(main.tensors if self.has_main else ()), *first.tensors, *second.tensors)

    def begin_loading(self) -> None:
        """Let :attr:`flats` be what is written to until :meth:`take_loaded`."""
        self._loading = self.flats

    def take_loaded(self, num_steps: int) -> None:
        """As :meth:`StatePart.take_loaded`."""
        self.num_steps.fill_(num_steps)
        loaded, self._loading = self.flats, None
        for one, values in zip(self.states, loaded.values(), strict=True):
            one.pack(Span(0, self.span.size), values.to(self.weights.device))
        if self.has_main and not self.has_remainders:
            self.weights.copy_(loaded["weight"])

    def step(self, grads: Tensor, decays: Sequence[DecaySpan], options: AdamOptions) -> None:
        """One update by the gradients of everything that the optimizer updates."""
        self.num_steps += 1
        for chunk in chunks(self.span.size) if self.has_fp8_moments else (Span(0, self.span.size),):
            first, second = (one.unpack(chunk) for one in self.states[1:])
            shift = self.span.start + chunk.start
            for span, decayed in cut_by_decay(decays, Span(shift, self.span.start + chunk.end), options):
                own = span.after(shift)
                moments = own.inside(first), own.inside(second)
                adam_(self._adam_state(span.after(self.span.start), span.inside(grads), moments), decayed)
            for one, updated in zip(self.states[1:], (first, second), strict=True):
                one.pack(chunk, updated)

    def _adam_state(self, own: Span, grads: Tensor, moments: tuple[Tensor, Tensor]) -> AdamState:
        """Of elements counted from the first of this part."""
        (kept,), weights = self.states[0].tensors, own.inside(self.weights)
        if self.has_remainders:
            return AdamState(weights, grads, *moments, self.num_steps, remainder_N=own.inside(kept))
        return AdamState(own.inside(kept), grads, *moments, self.num_steps, weights if self.has_main else None)


def chunks(num_elements: int) -> Iterator[Span]:
    """Stretches that are unpacked at once."""
    for start in range(0, num_elements, CHUNK):
        yield Span(start, min(start + CHUNK, num_elements))
