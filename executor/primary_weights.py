"""Weights that live and travel in FP8: no copy in bf16, main weights in fp32 with what this rank updates.

After each update every rank finds the largest magnitudes in its part of a weight (zero where it has none), the ranks
take the largest of all, and each quantizes its own part, which are then gathered at a byte an element (report section
5.3). Back ends round main weights to bf16 before, so that training is to the bit that of weights with a bf16 copy.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from moeplan.executor.collectives import Pending, all_gather_raw, start_all_gather
from moeplan.executor.copies import Copies
from moeplan.executor.dtypes import Dtypes
from moeplan.executor.flat_buffer import FlatBuffer, Span
from moeplan.executor.optimizer_state import Moving
from moeplan.executor.parameters import Entry
from moeplan.executor.quantized import QuantizedWeight, quantized_of
from moeplan.executor.scopes import scope
from moeplan.executor.units import Unit
from moeplan.kernels.quantized_gemm import Pair


class PrimaryBuffer(FlatBuffer):
    """Parameters of :func:`split_quantized`: ``stored`` in FP8, one byte an element, whole on every rank.

    Parameters have no storage but inside :meth:`gather` and :meth:`release`. ``moving``, where it is set, takes main
    weights, its first tensor, to the host and back.
    """

    holds_main = True
    stored_dtype = torch.uint8

    def __init__(self, entries: Sequence[Entry], dtypes: Dtypes, copies: Copies, *, is_sharded: bool) -> None:
        super().__init__(entries, dtypes, copies, is_sharded=is_sharded)
        self.main = self.updated.inside(self.weights).to(dtypes.main)
        self.moving: Moving | None = None
        self.stored = torch.zeros_like(self.weights, dtype=self.stored_dtype)
        self._amax: list[Tensor] = []
        self._pairs: dict[int, Pair] = {}
        self.release()
        self.start_gather()
        self.finish_gather()

    @property
    def updated_weights(self) -> Tensor:
        """Main weights, where they are now."""
        if self.moving is None or self.moving.is_here:
            return self.main
        self.moving.wait_on_host()
        return self.moving.host[0]

    @contextmanager
    def _main_here(self) -> Iterator[None]:
        """Main weights are on the device inside, and afterwards where they were."""
        is_away = self.moving is not None and not self.moving.is_here
        if self.moving is not None:
            self.moving.fetch()
            self.moving.wait()
        yield
        if self.moving is not None and is_away:
            self.moving.send_away()

    @property
    def resident_weights(self) -> Tensor:
        """Of the two forms of each weight the one that travels."""
        return self.stored

    def start_gather(self) -> None:
        """Quantize what was updated here, and begin to bring it to all."""
        with torch.no_grad(), scope("optimizer"), self._main_here():
            self._amax = self._largest()
            self._pairs = {index: pair for index, pair in enumerate(self._quantized()) if pair is not None}
        shard = self.copies.shard
        self._gathering = None
        if self.is_sharded and shard.size > 1:
            with scope("dp_comm"):
                self._gathering = start_all_gather(self.stored, self.own.inside(self.stored).clone(), shard)
        else:
            self._gathering = Pending(self.stored, self.stored, None)

    def finish_gather(self) -> None:
        """Wait for the weights of all ranks, and turn those for the gradients of inputs."""
        if self._gathering is None:
            return
        super().finish_gather()
        with torch.no_grad(), scope("optimizer"):
            for index, (entry, span) in enumerate(self.spans()):
                weight = _quantized(entry)
                weight.take(self._pairs.get(index) or self._turned(entry, span, self._amax[index]))
        self._pairs = {}

    def _largest(self) -> list[Tensor]:
        """What scales each weight: the largest of all ranks'."""
        own = []
        for entry, span in self.spans():
            weight = _quantized(entry)
            part = self._own_part(span, _stacked_shape(entry))
            own.append(weight.backend(entry.parameter).weight_amax(part, weight.recipe))
        if not (self.is_sharded and self.copies.shard.size > 1):
            return own
        flat = torch.cat([amax.flatten() for amax in own])
        with scope("dp_comm"):
            flat = all_gather_raw(flat[None], self.copies.shard).amax(0)
        parts = flat.split([amax.numel() for amax in own])
        return [part.view(amax.shape) for part, amax in zip(parts, own, strict=True)]

    def _quantized(self) -> Iterator[Pair | None]:
        """Both forms of each weight that is all this rank's; of the others its part goes into ``stored``."""
        for (entry, span), amax in zip(self.spans(), self._amax, strict=True):
            weight, shape = _quantized(entry), _stacked_shape(entry)
            ours = span.overlap(self.updated)
            if not ours.size:
                yield None
                continue
            part = self._own_part(span, shape)
            pair = weight.backend(entry.parameter).quantize_weights(part, weight.recipe, amax)
            stored = pair.as_is[0].view(torch.uint8).flatten()
            ours.inside(self.stored).copy_(ours.after(span.start).inside(stored))
            del stored
            whole = (span.inside(self.stored).view(shape).view(pair.as_is[0].dtype), *pair.as_is[1:])
            yield Pair(whole, pair.turned) if ours == span else None

    def _turned(self, entry: Entry, span: Span, amax: Tensor) -> Pair:
        """Both forms of a weight that was gathered; transposed, it is what it would have been quantized to."""
        weight, shape = _quantized(entry), _stacked_shape(entry)
        stored_EAB = span.inside(self.stored).view(shape)
        scale, turned_scale = weight.backend(entry.parameter).weight_scales(amax, shape, weight.recipe)
        turned_EBA = stored_EAB.transpose(1, 2).contiguous()
        return Pair(
            (stored_EAB.view(torch.float8_e4m3fn), scale, None),
            (turned_EBA.view(torch.float8_e4m3fn), turned_scale, None),
        )

    def _own_part(self, span: Span, shape: tuple[int, ...]) -> Tensor:
        """A weight of which only this rank's part is not zero: where all is this rank's, the main weight itself."""
        ours = span.overlap(self.updated)
        if ours == span:
            return ours.after(self.updated.start).inside(self.main).view(shape)
        part = torch.zeros(span.size, dtype=torch.bfloat16, device=self.main.device)
        ours.after(span.start).inside(part).copy_(ours.after(self.updated.start).inside(self.main))
        return part.view(shape)

    def gather(self) -> None:
        """Give the parameters their main weights, rounded, of all ranks."""
        self.weights.untyped_storage().resize_(self.weights.numel() * self.weights.element_size())
        self.updated.inside(self.weights).copy_(self.updated_weights)
        if self.is_sharded and self.copies.shard.size > 1:
            start_all_gather(self.weights, self.own.inside(self.weights).clone(), self.copies.shard).finish()

    def release(self) -> None:
        """Let go of what :meth:`gather` brought."""
        self.weights.untyped_storage().resize_(0)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's main weights, by the whole tensor they lie in."""
        main = self.updated_weights
        for entry, span in self.spans():
            ours = span.overlap(self.updated)
            if ours.size:
                yield entry.pieces[0].name, ours.after(self.updated.start).inside(main)


def split_quantized(units: Sequence[Unit]) -> Iterator[tuple[Unit, bool]]:
    """Each unit's parameters that are quantized apart from the others; with whether they are."""
    for unit in units:
        for is_quantized in (False, True):
            entries = tuple(one for one in unit.entries if (quantized_of(one.parameter) is not None) == is_quantized)
            if entries:
                yield replace(unit, entries=entries), is_quantized


def _quantized(entry: Entry) -> QuantizedWeight:
    weight = quantized_of(entry.parameter)
    assert weight is not None
    return weight


def _stacked_shape(entry: Entry) -> tuple[int, ...]:
    shape = tuple(entry.parameter.shape)
    return shape if len(shape) == 3 else (1, *shape)
