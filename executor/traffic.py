"""Counting what collectives send, call by call; nothing is counted unless asked for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from moeplan.executor.mesh import Group

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective call of this rank.

    ``message_bytes``: all_reduce the buffer of a rank; all_gather and reduce_scatter the whole buffer; all_to_all all
    that the rank sends, its own part included. ``to_bytes``, of all_to_all, by rank of the group.
    """

    kind: Collective
    ranks: tuple[int, ...]
    message_bytes: int
    to_bytes: tuple[int, ...] = ()


_counted: list[list[Sent]] = []  # lists being filled; empty while nobody counts


@contextmanager
def counting_traffic() -> Iterator[list[Sent]]:
    """The calls made inside, in order, on this rank and in any of its threads (backward has one of its own)."""
    calls: list[Sent] = []
    _counted.append(calls)
    try:
        yield calls
    finally:
        _counted.remove(calls)


def count(kind: Collective, group: Group, message_bytes: int, to_bytes: Sequence[int] = ()) -> None:
    """Note one call. Costs a look at an empty list where nobody counts."""
    for calls in _counted:
        calls.append(Sent(kind, group.ranks, message_bytes, tuple(to_bytes)))
