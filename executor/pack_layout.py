"""Where the tokens of one pack lie: the documents that some ranks hold together in one micro-batch (dynamic cp).

Documents lie one after the other, each padded to two equal chunks a rank, cut again by tp. Padding comes last in its
document, where no token attends to it, and its targets are none: it changes nothing but for what counts tokens.

Shapes: T tokens of the tp group, L = T / tp of this rank, D documents.
"""
# ruff: noqa: N802 - shape suffixes

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from moeplan.cp_schedule import padded_length
from moeplan.executor.context import own_positions
from moeplan.executor.mesh import Group

ValueT = TypeVar("ValueT")


@dataclass(eq=False)
class PackLayout:
    """``lengths`` of documents without padding, shared by ``group``; ``tp_group`` are this rank and its tp neighbours.

    ``tp_cp_group``: all ranks that share the pack. ``num_step_tokens``: of all packs of the step. ``num_missing``:
    tokens that this rank has fewer than the fullest one in the micro-batch. ``is_pack``: otherwise these are documents
    of whole sequences, without padding, on a ``group`` of one; experts are routed and balanced as without them.
    """

    lengths: tuple[int, ...]
    group: Group
    tp_group: Group
    tp_cp_group: Group
    num_step_tokens: int
    device: torch.device
    num_missing: int = 0
    is_pack: bool = True
    _kept: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def documents(self) -> tuple[int, ...]:
        """Lengths with padding; an idle rank's document, of no tokens, is padding alone."""
        if not self.is_pack:
            return self.lengths
        return tuple(padded_length(max(length, 1), self.group.size, self.tp_group.size) for length in self.lengths)

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return sum(self.documents) // self.group.size

    @property
    def has_padding(self) -> bool:
        return self.documents != self.lengths

    @cached_property
    def places_T(self) -> Tensor:
        """Positions in the pack of this tp group's tokens, in the order in which it holds them."""
        return own_positions(self.documents, self.group, self.device)

    @cached_property
    def document_L(self) -> Tensor:
        """The document of each token of this rank; D, one beyond the last, for padding."""
        documents = torch.tensor(self.documents, device=self.device)
        starts, lengths = documents.cumsum(0) - documents, torch.tensor(self.lengths, device=self.device)
        places_L = self.places_T.chunk(self.tp_group.size)[self.tp_group.index]
        document_L = torch.searchsorted(starts, places_L, right=True) - 1
        is_padding_L = places_L - starts[document_L] >= lengths[document_L]
        return document_L.masked_fill(is_padding_L, len(self.lengths))

    @cached_property
    def is_real_L(self) -> Tensor:
        """Which tokens of this rank are no padding."""
        return self.document_L < len(self.lengths)

    def keep(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
        """What ``make`` returned the first time it was asked for ``key``: layers of one kind share it."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast("ValueT", self._kept[key])
