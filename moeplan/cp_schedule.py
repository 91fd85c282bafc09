"""Dynamic context parallelism: which ranks share which documents, micro-batch by micro-batch (report section 6).

Heavy documents get groups of more ranks, light ones share a rank. What a pack costs is the caller's: seconds for the
planner, model FLOPs for a run, whose ranks must all find the same schedule without knowing any machine.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moeplan.errors import InvalidInputError
from moeplan.flops import attention_flops_by_window, seen_keys, training_flops_per_token
from moeplan.model_spec import ModelSpec

# Numbers of micro-batches aimed at, over the fewest that memory or the pipeline allows: from, up to, by this factor.
# The aim counts no ring and no idle rank, so it starts below 1.
SWEEP_FROM, SWEEP_TO, SWEEP_FACTOR = 0.6, 4.0, 1.15
# Schedules by FLOPs count neither rings nor launches: up to this much more of them is spent for less of those. On six
# log-normal batches of 131072-token sequences (64 H100, native stack) what is chosen then is predicted to take at most
# 3.3 % longer than the fastest schedule of the sweep (docs/log.md).
KNEE_FRAC = 0.10


class PackCost(Protocol):
    """What documents cost the ranks that share them, in a unit of its own."""

    def attention(self, length: int, num_ranks: int) -> float:
        """Attention of one document, on each of the ranks that share it."""
        ...

    def pack(self, num_tokens: int, attention: float, num_ranks: int) -> float:
        """All of a pack whose documents' attention sums to ``attention``, on each of its ranks."""
        ...

    def work(self, length: int) -> float:
        """One document on one rank, what every micro-batch costs left out."""
        ...

    @property
    def fixed(self) -> float:
        """What every micro-batch costs, however few its tokens."""
        ...


@dataclass(frozen=True, slots=True)
class RankPack:
    """Documents that ``num_ranks`` ranks hold together in one micro-batch; ``cost`` is that of each of them."""

    num_ranks: int
    lengths: tuple[int, ...]
    cost: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packs that run side by side. Experts are shared by all ranks, so the slowest pack is everybody's time."""

    packs: tuple[RankPack, ...]

    @property
    def cost(self) -> float:
        return max(pack.cost for pack in self.packs)


@dataclass(frozen=True, slots=True)
class PlacedPack:
    """Documents, by their index in the step, on ``num_ranks`` ranks from ``first_rank`` on (of data x context)."""

    first_rank: int
    num_ranks: int
    documents: tuple[int, ...]


def padded_length(length: int, num_ranks: int, tp: int = 1) -> int:
    """Tokens a document takes on a group of ranks: two equal chunks each where they are several, cut again by tp."""
    pieces = tp * (2 * num_ranks if num_ranks > 1 else 1)
    return -(-length // pieces) * pieces


def step_cost(batches: Sequence[MicroBatch], pp: int, vp: int = 1) -> float:
    """Of jobs that cost the same on each of P stages: their sum, and the costliest (P - 1) / V times."""
    costs = [one.cost for one in batches]
    return sum(costs) + (pp - 1) / vp * max(costs)


@dataclass(slots=True)
class _Group:
    """A pack being filled."""

    num_ranks: int
    lengths: list[int]
    num_tokens: int
    attention: float


@dataclass(frozen=True, slots=True)
class Filler:
    """Fills micro-batches: groups for heavy documents by work, then light ones as long as cost and memory allow.

    ``num_ranks`` in all, groups of powers of two up to ``largest``; ``max_tokens`` is what a rank holds, padding
    included.
    """

    costs: PackCost
    num_ranks: int
    largest: int
    max_tokens: int
    tp: int = 1

    def check(self, longest: int) -> None:
        """Raise InvalidInputError where a document of ``longest`` tokens fits in no group."""
        if padded_length(longest, self.largest, self.tp) > self.largest * self.max_tokens:
            raise InvalidInputError(
                f"lengths: a document of {longest} tokens, allowed: at most {self.largest * self.max_tokens} in the "
                f"largest group, {self.largest} ranks",
                "allow more tokens a rank, or larger groups",
            )

    def sweep(self, lengths: Sequence[int], pp: int) -> Iterator[tuple[MicroBatch, ...]]:
        """Schedules for numbers of micro-batches around and above the fewest that memory or the pipeline allows."""
        work = sum(map(self.costs.work, lengths))
        fewest = max(pp, sum(lengths) / (self.num_ranks * self.max_tokens))
        num = SWEEP_FROM * fewest
        while num <= SWEEP_TO * fewest:
            yield tuple(self.fill(lengths, self.costs.fixed + work / (num * self.num_ranks)))
            num *= SWEEP_FACTOR

    def fill(self, lengths: Sequence[int], target: float) -> Iterator[MicroBatch]:
        """Micro-batches that cost about ``target`` each, the heaviest documents first."""
        left = sorted(lengths, reverse=True)
        while left:
            groups, left = self._next(left, target)
            yield MicroBatch(tuple(RankPack(one.num_ranks, tuple(one.lengths), self._cost(one)) for one in groups))

    def _next(self, lengths: list[int], target: float) -> tuple[list[_Group], list[int]]:
        """Groups of one micro-batch, and the documents left for later ones."""
        heaviest = self._open(lengths[0], target)
        limit = max(target, self._cost(heaviest))
        groups, free, waiting = [heaviest], self.num_ranks - heaviest.num_ranks, []
        for length in lengths[1:]:
            group = self._open(length, limit) if free else None
            if group is None or group.num_ranks > free:
                waiting.append(length)
                continue
            groups.append(group)
            free -= group.num_ranks
        left = [length for length in waiting if not self._add(groups, length, limit)]
        if not left:
            self._widen(groups, free)
        return groups, left

    def _open(self, length: int, limit: float) -> _Group:
        """A group of the fewest ranks that hold the document and end within the limit, or else the fastest."""
        fastest: _Group | None = None
        num_ranks = 1
        while num_ranks <= self.largest:
            padded = padded_length(length, num_ranks, self.tp)
            if padded <= num_ranks * self.max_tokens:
                group = _Group(num_ranks, [length], padded, self.costs.attention(length, num_ranks))
                if self._cost(group) <= limit:
                    return group
                if fastest is None or self._cost(group) < self._cost(fastest):
                    fastest = group
            num_ranks *= 2
        assert fastest is not None, "documents fit in the largest group"
        return fastest

    def _add(self, groups: list[_Group], length: int, limit: float) -> bool:
        """Put the document into the group that then ends first, if memory and the limit allow one."""
        best: _Group | None = None
        best_cost, best_attention, best_tokens = limit, 0.0, 0
        for group in groups:
            tokens = group.num_tokens + padded_length(length, group.num_ranks, self.tp)
            if tokens > group.num_ranks * self.max_tokens:
                continue
            attention = group.attention + self.costs.attention(length, group.num_ranks)
            cost = self.costs.pack(tokens, attention, group.num_ranks)
            if cost <= best_cost:
                best, best_cost, best_attention, best_tokens = group, cost, attention, tokens
        if best is None:
            return False
        best.lengths.append(length)
        best.num_tokens, best.attention = best_tokens, best_attention
        return True

    def _widen(self, groups: list[_Group], free: int) -> None:
        """Give ranks that would be idle to the slowest pack, as long as that helps."""
        while True:
            slowest = max(groups, key=self._cost)
            num_ranks = 2 * slowest.num_ranks
            if slowest.num_ranks > free or num_ranks > self.largest:
                return
            wider = _Group(
                num_ranks,
                slowest.lengths,
                sum(padded_length(length, num_ranks, self.tp) for length in slowest.lengths),
                sum(self.costs.attention(length, num_ranks) for length in slowest.lengths),
            )
            if wider.num_tokens > num_ranks * self.max_tokens or self._cost(wider) >= self._cost(slowest):
                return
            free -= slowest.num_ranks
            groups[groups.index(slowest)] = wider

    def _cost(self, group: _Group) -> float:
        return self.costs.pack(group.num_tokens, group.attention, group.num_ranks)


@dataclass(frozen=True, slots=True)
class FlopCost:
    """Model FLOPs, forward and backward: equally many on every rank of a pack, as causal chunks are paired.

    ``token_flops`` of a token without attention, ``key_flops`` of a token and key by window of the layers.
    """

    token_flops: float
    key_flops: tuple[tuple[int | None, float], ...]

    @classmethod
    def of(cls, model: ModelSpec) -> "FlopCost":
        """Those of ``training_flops_per_token``."""
        by_window = attention_flops_by_window(model)
        attention_flops = sum(flops * seen_keys(1, window) for window, flops in by_window.items())
        return cls(training_flops_per_token(model, 1) - attention_flops, tuple(by_window.items()))

    def attention(self, length: int, num_ranks: int) -> float:
        return sum(flops * seen_keys(length, window) for window, flops in self.key_flops) / num_ranks

    def pack(self, num_tokens: int, attention: float, num_ranks: int) -> float:
        return self.token_flops * num_tokens / num_ranks + attention

    def work(self, length: int) -> float:
        return self.pack(length, self.attention(length, 1), 1)

    @property
    def fixed(self) -> float:
        return 0.0


def flop_schedule(filler: Filler, lengths: Sequence[int], pp: int) -> tuple[MicroBatch, ...]:
    """Among schedules near the fewest FLOPs of the slowest ranks, that with the shortest rings, then the shortest."""
    found = list(filler.sweep(lengths, pp))
    costs = [step_cost(one, pp) for one in found]
    limit = min(costs) * (1 + KNEE_FRAC)
    near = (one for one, cost in zip(found, costs, strict=True) if cost <= limit)
    return min(near, key=lambda one: (ring_tokens(one), len(one)))


def ring_tokens(batches: Sequence[MicroBatch]) -> int:
    """Tokens whose keys and values pass in rings, each once for every rank that it comes to."""
    return sum((pack.num_ranks - 1) * sum(pack.lengths) for one in batches for pack in one.packs)


def placed(batches: Sequence[MicroBatch], lengths: Sequence[int]) -> tuple[tuple[PlacedPack, ...], ...]:
    """Every pack on its ranks, and which of the documents of ``lengths`` it holds.

    Packs of powers of two one after the other, the largest first, begin at multiples of their size: so a rank needs
    one group for each size, made once.
    """
    waiting: defaultdict[int, deque[int]] = defaultdict(deque)
    for index, length in enumerate(lengths):
        waiting[length].append(index)
    return tuple(tuple(_placed(batch, waiting)) for batch in batches)


def _placed(batch: MicroBatch, waiting: defaultdict[int, deque[int]]) -> Iterator[PlacedPack]:
    first = 0
    for pack in sorted(batch.packs, key=lambda pack: -pack.num_ranks):
        yield PlacedPack(first, pack.num_ranks, tuple(waiting[length].popleft() for length in pack.lengths))
        first += pack.num_ranks


def tokens_by_size(batches: Sequence[MicroBatch]) -> dict[int, int]:
    """Tokens of packs by the number of ranks that share them, ascending."""
    found: Counter[int] = Counter()
    for one in batches:
        for pack in one.packs:
            found[pack.num_ranks] += sum(pack.lengths)
    return dict(sorted(found.items()))


def largest_group(num_ranks: int) -> int:
    """The largest power of two up to ``num_ranks``."""
    return 1 << (num_ranks.bit_length() - 1)
