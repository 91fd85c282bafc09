"""Parameters that are reduced and gathered together, in one flat buffer, with their gradients in another.

One buffer, so that reducing gradients and gathering weights is one collective, whatever the number of parameters:
those of a layer, or of a whole class (dense or expert). Order: what other pipeline ranks hold as well, then parameters
split over the class's tensor-parallel group, then replicated ones. Each begins at a whole 16-byte word, as each rank's
part does; gaps hold zeros in weights, gradients and states.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeplan.executor.collectives import (
    Pending,
    all_reduce,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from moeplan.executor.copies import Copies
from moeplan.executor.dtypes import Dtypes
from moeplan.executor.parameters import Entry
from moeplan.executor.scopes import scope
from moeplan.kernels.main_grad import MainGrad, set_main_grad

# Grouped GEMMs and copies by TMA take no operand that begins elsewhere, and kernels read others element by element.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Span:
    """Elements ``start`` to ``end`` of a flat buffer."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def overlap(self, other: "Span") -> "Span":
        """What both hold; empty (start == end) where they are apart."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.end, other.end)))

    def inside(self, flat: Tensor) -> Tensor:
        """The view of those elements."""
        return flat[self.start : self.end]

    def after(self, start: int) -> "Span":
        """The same elements counted from ``start``."""
        return Span(self.start - start, self.end - start)


class FlatBuffer:
    """Weights and accumulated gradients, whole on every rank of ``copies.shard``.

    ``updated`` is what this rank's optimizer updates: its part where ``is_sharded``, else everything. After
    construction every parameter is a view of ``weights``, and backward adds its gradient to ``grads``. ``holds_main``:
    what is updated is the main weights themselves, and nothing else. ``stored_dtype``: of what holds the weights, where
    that is not the type of parameters.
    """

    holds_main = False
    stored_dtype: torch.dtype | None = None

    def __init__(self, entries: Sequence[Entry], dtypes: Dtypes, copies: Copies, *, is_sharded: bool) -> None:
        self.copies, self.is_sharded = copies, is_sharded
        # Runs of one kind, so that few spans say which elements are shared, which replicated and which decay.
        self.entries = sorted(entries, key=_kind)
        self.word = ALIGNMENT_BYTES // (self.stored_dtype or dtypes.param).itemsize
        self.num_elements = sum(round_up(entry.parameter.numel(), self.word) for entry in self.entries)
        part = round_up(-(-self.num_elements // copies.shard.size), self.word)
        self.own = Span(part * copies.shard.index, part * (copies.shard.index + 1))
        self.updated = self.own if is_sharded else Span(0, part * copies.shard.size)
        device = self.entries[0].parameter.device
        self.weights = torch.zeros(part * copies.shard.size, dtype=dtypes.param, device=device)
        self.grads = torch.zeros(part * copies.shard.size, dtype=dtypes.grad, device=device)
        self.main_grads: list[MainGrad] = []
        self.decayed: list[Span] = []
        self.kept: list[Span] = []
        self.gaps: list[Span] = []
        self.shared_end, self.replicated_start = 0, self.num_elements
        self._reducing: Pending | None = None
        self._gathering: Pending | None = None
        self._adopt()

    def _adopt(self) -> None:
        for entry, span in self.spans():
            view = span.inside(self.weights).view_as(entry.parameter)
            entry.fill(view)
            entry.parameter.data = view
            main = MainGrad(span.inside(self.grads).view_as(entry.parameter))
            entry.parameter.register_post_accumulate_grad_hook(_adds_to(main))
            set_main_grad(entry.parameter, main)
            self.main_grads.append(main)
            end = round_up(span.end, self.word)
            if entry.is_shared:
                self.shared_end = end
            if entry.is_replicated:
                self.replicated_start = min(self.replicated_start, span.start)
            _extend(self.decayed if entry.is_decayed else self.kept, Span(span.start, end))
            _extend(self.gaps, Span(span.end, end))
        _extend(self.gaps, Span(self.num_elements, self.weights.numel()))

    def spans(self) -> Iterator[tuple[Entry, Span]]:
        """Every parameter with its elements."""
        start = 0
        for entry in self.entries:
            yield entry, Span(start, start + entry.parameter.numel())
            start += round_up(entry.parameter.numel(), self.word)

    @property
    def updated_weights(self) -> Tensor:
        """What this rank updates, in the compute type; others learn of it by :meth:`start_gather`."""
        return self.updated.inside(self.weights)

    @property
    def resident_weights(self) -> Tensor:
        """What of the weights stays in memory."""
        return self.weights

    @property
    def resident_grads(self) -> Tensor:
        """What of the gradients stays in memory."""
        return self.grads

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's weights, each by the first whole tensor that it has a part of."""
        yield from ((entry.pieces[0].name, entry.parameter) for entry in self.entries)

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's gradients of each whole tensor that it has a part of."""
        for entry, span in self.spans():
            grad = span.inside(self.grads).view(entry.parameter.shape)
            yield from ((piece.name, grad[piece.target]) for piece in entry.pieces)

    def start_reduce(self) -> None:
        """Begin to sum gradients over the copies; once a step, after the last micro-batch's backward."""
        if self._reducing is not None:
            return
        for main in self.main_grads:
            main.finish_()
        with scope("dp_comm"):
            self._reducing = self._begin_sum()

    def _begin_sum(self) -> Pending:
        shard = self.copies.shard
        if self.is_sharded and shard.size > 1:
            return start_reduce_scatter(torch.empty_like(self.own.inside(self.grads)), self.grads, shard)
        return start_all_reduce(self.grads, shard)

    def reduced_grads(self) -> Tensor:
        """Gradients of what this rank updates, summed over everything that has a part of them."""
        self.start_reduce()
        assert self._reducing is not None
        with scope("dp_comm"):
            grads = all_reduce(self._reducing.finish(), self.copies.replica)
        self._reducing = None
        self._sum_parts(grads)
        return grads

    def _sum_parts(self, grads: Tensor) -> None:
        """Complete the gradients of replicated and of shared parameters; ``grads`` are of what is updated here."""
        replicated = Span(self.replicated_start, self.num_elements).overlap(self.updated).after(self.updated.start)
        if replicated.size:
            with scope("tp_comm"):
                all_reduce(replicated.inside(grads), self.copies.partial)
        shared = Span(0, self.shared_end).overlap(self.updated).after(self.updated.start)
        if shared.size and self.copies.pipeline is not None:
            with scope("pp_comm"):
                all_reduce(shared.inside(grads), self.copies.pipeline)

    @property
    def is_reducing(self) -> bool:
        """Whether a sum of gradients is under way."""
        return self._reducing is not None

    @property
    def is_gathering(self) -> bool:
        """Whether weights are under way."""
        return self._gathering is not None

    def clear_grads(self) -> None:
        """Begin a step."""
        for main in self.main_grads:
            main.clear_()

    def start_gather(self) -> None:
        """Begin to bring every rank's updated weights to all."""
        shard = self.copies.shard
        if self.is_sharded and shard.size > 1:
            own = self.own.inside(self.weights).clone()
            with scope("dp_comm"):
                self._gathering = start_all_gather(self.weights, own, shard)

    def finish_gather(self) -> None:
        """Wait until the weights are those of all ranks."""
        if self._gathering is not None:
            with scope("dp_comm"):
                self._gathering.finish()
            self._gathering = None

    @property
    def counted(self) -> Span:
        """Elements whose square this rank adds to the global norm, so that each parameter counts once."""
        end = self.num_elements if self.copies.partial.index == 0 else self.replicated_start
        pipeline, replica = self.copies.pipeline, self.copies.replica
        is_first = pipeline is None or pipeline.index == 0
        part = -(-self.own.size // replica.size)
        start = self.own.start + part * replica.index
        ours = Span(start, start + part).overlap(self.own)
        return ours.overlap(Span(0 if is_first else self.shared_end, end))


def _kind(entry: Entry) -> tuple[bool, bool, bool]:
    return not entry.is_shared, entry.is_replicated, entry.is_decayed == entry.is_replicated


def _adds_to(main: MainGrad) -> Callable[[nn.Parameter], None]:
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:  # None: a GEMM has added it itself
            main.add_(parameter.grad)
            parameter.grad = None

    return add


def round_up(number: int, step: int) -> int:
    """The least multiple of ``step`` that is no less."""
    return -(-number // step) * step


def _extend(spans: list[Span], span: Span) -> None:
    """Append what is not empty, or lengthen the last where they touch."""
    if not span.size:
        return
    if spans and spans[-1].end == span.start:
        spans[-1] = Span(spans[-1].start, span.end)
    else:
        spans.append(span)
