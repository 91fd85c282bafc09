"""All parameters of one class (dense or expert) in one flat buffer, with their gradients in another.

One buffer, so that reducing gradients and gathering weights is one collective a class, whatever the number of
parameters. Order: what other pipeline ranks hold as well, then parameters split over the class's tensor-parallel group,
then replicated ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeplan.executor.collectives import all_gather_into, all_reduce, reduce_scatter_raw
from moeplan.executor.dtypes import Dtypes
from moeplan.executor.mesh import Group
from moeplan.executor.parameters import Entry
from moeplan.executor.scopes import scope
from moeplan.kernels.accumulate import accumulate_


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


class FlatBuffer:
    """Weights and accumulated gradients of one class. ``shard_group`` holds copies of the same weights.

    ``replica_group`` (tp for dense, etp for expert parameters) is where each rank has a part of the gradient of the
    replicated parameters, ``pipeline_group`` where each has a part of that of the shared ones. After construction every
    parameter is a view of ``weights``, and backward adds its gradient to ``grads``.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        dtypes: Dtypes,
        shard_group: Group,
        replica_group: Group,
        pipeline_group: Group | None = None,
    ) -> None:
        self.shard_group, self.replica_group, self.pipeline_group = shard_group, replica_group, pipeline_group
        # Runs of one kind, so that few spans say which elements are shared, which replicated and which decay.
        self.entries = sorted(entries, key=_kind)
        self.num_elements = sum(entry.parameter.numel() for entry in self.entries)
        part = -(-self.num_elements // shard_group.size)
        self.own = Span(part * shard_group.index, part * (shard_group.index + 1))
        device = self.entries[0].parameter.device
        self.weights = torch.zeros(part * shard_group.size, dtype=dtypes.param, device=device)
        self.grads = torch.zeros(part * shard_group.size, dtype=dtypes.grad, device=device)
        self.decayed: list[Span] = []
        self.kept: list[Span] = []
        self.shared_end, self.replicated_start = 0, self.num_elements
        self._adopt()

    def _adopt(self) -> None:
        start = 0
        for entry in self.entries:
            span = Span(start, start + entry.parameter.numel())
            start = span.end
            view = span.inside(self.weights).view_as(entry.parameter)
            view.copy_(entry.parameter.detach())
            entry.parameter.data = view
            grad = span.inside(self.grads).view_as(entry.parameter)
            entry.parameter.register_post_accumulate_grad_hook(_adds_to(grad))
            if entry.is_shared:
                self.shared_end = span.end
            if entry.is_replicated:
                self.replicated_start = min(self.replicated_start, span.start)
            _extend(self.decayed if entry.is_decayed else self.kept, span)

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's gradients of each whole tensor that it has a part of."""
        start = 0
        for entry in self.entries:
            span = Span(start, start + entry.parameter.numel())
            start = span.end
            grad = span.inside(self.grads).view(entry.parameter.shape)
            yield from ((piece.name, grad[piece.target]) for piece in entry.pieces)

    def sum_replicated(self) -> None:
        """Complete the gradients of replicated parameters."""
        with scope("tp_comm"):
            all_reduce(self.grads[self.replicated_start : self.num_elements], self.replica_group)

    def sum_shared(self) -> None:
        """Complete the gradients of what several pipeline ranks hold."""
        if self.shared_end and self.pipeline_group is not None:
            with scope("pp_comm"):
                all_reduce(self.grads[: self.shared_end], self.pipeline_group)

    def reduce_scatter_grads(self) -> Tensor:
        """This rank's shard of the gradients, summed over the copies."""
        with scope("dp_comm"):
            return reduce_scatter_raw(self.grads, self.shard_group)

    def all_reduce_grads(self) -> Tensor:
        """All gradients, summed over the copies."""
        with scope("dp_comm"):
            return all_reduce(self.grads, self.shard_group)

    def gather_weights(self) -> None:
        """Bring every rank's shard of the weights to all."""
        if self.shard_group.size > 1:
            with scope("dp_comm"):
                all_gather_into(self.weights, self.own.inside(self.weights).clone(), self.shard_group)

    @property
    def counted(self) -> Span:
        """Elements whose square this rank adds to the global norm, so that each parameter counts once."""
        end = self.num_elements if self.replica_group.index == 0 else self.replicated_start
        is_first = self.pipeline_group is None or self.pipeline_group.index == 0
        return self.own.overlap(Span(0 if is_first else self.shared_end, end))


def _kind(entry: Entry) -> tuple[bool, bool, bool]:
    return not entry.is_shared, entry.is_replicated, entry.is_decayed == entry.is_replicated


def _adds_to(grad: Tensor) -> Callable[[nn.Parameter], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        accumulate_(grad, parameter.grad)
        parameter.grad = None

    return add


def _extend(spans: list[Span], span: Span) -> None:
    """Append, or lengthen the last where they touch."""
    if spans and spans[-1].end == span.start:
        spans[-1] = Span(spans[-1].start, span.end)
    else:
        spans.append(span)
