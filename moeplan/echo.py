"""ECHO: which hot experts get a clone on which rank, and which of their tokens go there (report section 3.5).

Numeric only, so that simulator and executor plan alike: every rank knows all counts and comes to the same plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

NUM_BUCKETS = 8  # of spills by size; the first holds all of at least the mean load


@dataclass(frozen=True, slots=True)
class Clone:
    """A copy of ``expert`` in spare slot ``slot`` of expert-parallel rank ``rank``.

    ``taken``: how many of its first tokens each source rank sends here instead of home, after those of clones before.
    """

    expert: int
    rank: int
    slot: int
    taken: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.taken)


@dataclass(frozen=True, slots=True)
class EchoPlan:
    """Clones in order; ``num_local`` experts live on each rank, beside ``num_slots`` spare slots."""

    num_local: int
    num_slots: int
    clones: tuple[Clone, ...]

    def home_id(self, expert: int) -> int:
        """Number of an expert where each rank holds its own and then its spare slots."""
        rank, place = divmod(expert, self.num_local)
        return rank * (self.num_local + self.num_slots) + place

    def clone_id(self, clone: Clone) -> int:
        """The same of a clone."""
        return clone.rank * (self.num_local + self.num_slots) + self.num_local + clone.slot


def echo_plan(counts: Sequence[Sequence[int]], num_ranks: int, num_slots: int) -> EchoPlan:
    """The clones for ``counts[source][expert]`` tokens where ``num_ranks`` ranks have ``num_slots`` spare slots each.

    Loads above the mean spill, largest experts first; ranks below it take what they have room for. One slot a rank:
    approximate bin packing; more: one pass over spills and room as consecutive intervals.
    """
    num_local = len(counts[0]) // num_ranks
    load = [sum(column) for column in zip(*counts, strict=True)]
    by_rank = [sum(load[rank * num_local : (rank + 1) * num_local]) for rank in range(num_ranks)]
    mean = sum(by_rank) // num_ranks
    spills = [spill for rank in range(num_ranks) for spill in _spills(load, rank, num_local, mean)]
    spills.sort(key=lambda spill: -spill[0])
    room = sorted(((mean - own, rank) for rank, own in enumerate(by_rank) if own < mean), key=lambda one: -one[0])
    placed = _pack(spills, room, mean) if num_slots == 1 else _overlap(spills, room, num_slots)
    return EchoPlan(num_local, num_slots, _with_sources(placed, counts, load))


def _spills(load: Sequence[int], rank: int, num_local: int, mean: int) -> list[tuple[int, int]]:
    """(tokens, expert) above the mean of one rank: its small experts stay whole, its largest ones spill."""
    home = sorted(range(rank * num_local, (rank + 1) * num_local), key=lambda expert: load[expert])
    over = [max(0, total - mean) for total in accumulate(load[expert] for expert in home)]
    parts = (after - before for before, after in zip([0, *over], over, strict=False))
    return [(tokens, expert) for expert, tokens in zip(home, parts, strict=True) if tokens]


def _pack(spills: list[tuple[int, int]], room: list[tuple[int, int]], mean: int) -> list[tuple[int, int, int, int]]:
    """(tokens, expert, rank, slot): each rank, most room first, takes of the first of the fullest bucket."""
    width = max(1.0, mean / (NUM_BUCKETS - 1))
    buckets: list[list[tuple[int, int]]] = [[] for _ in range(NUM_BUCKETS)]

    def put(spill: tuple[int, int]) -> None:
        buckets[max(0, NUM_BUCKETS - 1 - int(spill[0] / width))].append(spill)

    for spill in spills:
        put(spill)
    placed = []
    for free, rank in room:
        bucket = next((bucket for bucket in buckets if bucket), None)
        if bucket is None:
            break
        tokens, expert = bucket.pop(0)
        taken = min(tokens, free)
        placed.append((taken, expert, rank, 0))
        if tokens > taken:
            put((tokens - taken, expert))
    return placed


def _overlap(
    spills: list[tuple[int, int]], room: list[tuple[int, int]], num_slots: int
) -> list[tuple[int, int, int, int]]:
    """As :func:`_pack` where spills and room are laid end to end; each rank keeps its largest pieces."""
    pieces: dict[int, list[tuple[int, int]]] = {}
    for tokens, expert, place in _overlaps([size for size, _ in spills], [size for size, _ in room]):
        pieces.setdefault(room[place][1], []).append((tokens, spills[expert][1]))
    return [
        (tokens, expert, rank, slot)
        for rank, own in pieces.items()
        for slot, (tokens, expert) in enumerate(sorted(own, key=lambda piece: -piece[0])[:num_slots])
    ]


def _overlaps(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int, int]]:
    """(length, index, index) of each overlap of two rows of intervals that begin at 0."""
    found, left, right = [], list(first), list(second)
    i = j = 0
    while i < len(left) and j < len(right):
        length = min(left[i], right[j])
        if length:
            found.append((length, i, j))
        left[i] -= length
        right[j] -= length
        i, j = i + (left[i] == 0), j + (right[j] == 0)
    return found


def _with_sources(
    placed: list[tuple[int, int, int, int]], counts: Sequence[Sequence[int]], load: Sequence[int]
) -> tuple[Clone, ...]:
    """Each clone's tokens divided over source ranks: in proportion, and what rounding leaves from those with most."""
    clones = []
    left = [list(row) for row in counts]
    for tokens, expert, rank, slot in placed:
        taken = [tokens * row[expert] // load[expert] for row in counts]
        taken = [min(one, row[expert]) for one, row in zip(taken, left, strict=True)]
        missing = tokens - sum(taken)
        rest = [row[expert] - one for one, row in zip(taken, left, strict=True)]
        for length, source, _ in _overlaps(rest, [missing]):
            taken[source] += length
        for one, row in zip(taken, left, strict=True):
            row[expert] -= one
        clones.append(Clone(expert, rank, slot, tuple(taken)))
    return tuple(clones)
