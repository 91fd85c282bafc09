"""Dynamic context parallelism: a group size for every pack of documents, chosen micro-batch by micro-batch.

Static context parallelism gives every pack the ranks that the longest document needs: short ones pay for a ring that
their attention does not hide, and packs of as many tokens differ in the sum of their squares, for which everybody
waits. Here heavy documents get more ranks and light ones share one (report section 6).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.planner.pack_costs import PackCosts
from moeplan.simulator.stack import SoftwareStack

# Numbers of micro-batches aimed at, over the fewest that memory or the pipeline allows: from, up to, by this factor.
# The aim counts no ring and no idle rank, so it starts below 1.
SWEEP_FROM, SWEEP_TO, SWEEP_FACTOR = 0.6, 4.0, 1.15


@dataclass(frozen=True, slots=True)
class RankPack:
    """Documents that ``num_ranks`` ranks hold together in one micro-batch, and their forward and backward."""

    num_ranks: int
    lengths: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packs that run side by side. Experts are shared by all ranks, so the slowest pack is everybody's time."""

    packs: tuple[RankPack, ...]

    @property
    def seconds(self) -> float:
        return max(pack.seconds for pack in self.packs)


@dataclass(frozen=True)
class PackSchedule:
    """Micro-batches of one step on ``num_ranks`` ranks (data x context parallel) of every pipeline stage."""

    micro_batches: tuple[MicroBatch, ...]
    num_ranks: int
    pp: int
    vp: int

    @cached_property
    def step_s(self) -> float:
        """Of jobs that take equally long on each of P stages: their sum, and the longest (P - 1) / V times."""
        seconds = [one.seconds for one in self.micro_batches]
        return sum(seconds) + (self.pp - 1) / self.vp * max(seconds)

    @property
    def waiting_frac(self) -> float:
        """Part of the ranks' time that waits for the slowest pack of its micro-batch."""
        busy = sum(pack.seconds * pack.num_ranks for one in self.micro_batches for pack in one.packs)
        return max(0.0, 1 - busy / (self.num_ranks * sum(one.seconds for one in self.micro_batches)))

    @property
    def tokens_by_size(self) -> dict[int, int]:
        """Tokens of packs by the number of ranks that share them, ascending."""
        found: Counter[int] = Counter()
        for one in self.micro_batches:
            for pack in one.packs:
                found[pack.num_ranks] += sum(pack.lengths)
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class CpComparison:
    """One batch of documents under the plan's own cp, and under a cp chosen for each pack."""

    static: PackSchedule
    dynamic: PackSchedule
    max_tokens_per_rank: int

    @property
    def speed_up(self) -> float:
        return self.static.step_s / self.dynamic.step_s


@dataclass(slots=True)
class _Group:
    """A pack being filled."""

    num_ranks: int
    lengths: list[int]
    num_tokens: int
    attention_s: float


def compare_cp(
    plan: Plan,
    lengths: Sequence[int],
    profile: HardwareProfile,
    stack: SoftwareStack,
    *,
    max_tokens_per_rank: int | None = None,
    max_cp: int | None = None,
) -> CpComparison:
    """Static against dynamic context parallelism for one batch of documents of ``lengths`` tokens, in this order.

    ``max_tokens_per_rank``: what memory holds, by default what the plan's sequences give a rank. ``max_cp``: largest
    group, by default all data x context-parallel ranks. Raises InvalidInputError where a document fits in no group.
    """
    tokens = max_tokens_per_rank or plan.mbs * plan.seq_len // plan.cp
    num_ranks = plan.dp * plan.cp
    largest = 1 << (min(max_cp or num_ranks, num_ranks).bit_length() - 1)
    _check(plan, lengths, tokens * largest)
    costs = PackCosts(plan, profile, stack)
    static = PackSchedule(tuple(_static(plan, lengths, costs)), num_ranks, plan.pp, plan.vp)
    filler = _Filler(costs, num_ranks, largest, tokens)
    return CpComparison(static, _best(plan, lengths, filler), tokens)


def _check(plan: Plan, lengths: Sequence[int], largest_tokens: int) -> None:
    if not lengths:
        raise InvalidInputError("lengths: got no document, allowed: one or more", "write one length a line")
    longest = max(lengths)
    if min(lengths) < 1:
        raise InvalidInputError(f"lengths: got {min(lengths)}, allowed: 1 and more", "leave empty documents out")
    if longest > plan.seq_len:
        raise InvalidInputError(
            f"lengths: got a document of {longest} tokens, allowed: at most the plan's seq_len {plan.seq_len}",
            "plan for the longest document, or cut it",
        )
    if longest > largest_tokens:
        raise InvalidInputError(
            f"lengths: a document of {longest} tokens, allowed: at most {largest_tokens} in the largest group",
            "allow more tokens a rank, or larger groups",
        )


def _static(plan: Plan, lengths: Sequence[int], costs: PackCosts) -> Iterator[MicroBatch]:
    """Sequences filled in the order of the documents, as data loaders pack them; dp packs a micro-batch."""
    packs: list[RankPack] = []
    for pack in _filled_in_order(lengths, plan.mbs * plan.seq_len):
        attention_s = sum(costs.attention_s(length, plan.cp) for length in pack)
        packs.append(RankPack(plan.cp, tuple(pack), costs.pack_s(sum(pack), attention_s, plan.cp)))
    for start in range(0, len(packs), plan.dp):
        yield MicroBatch(tuple(packs[start : start + plan.dp]))


def _filled_in_order(lengths: Sequence[int], capacity: int) -> Iterator[list[int]]:
    filled: list[int] = []
    for length in lengths:
        if sum(filled) + length > capacity:
            yield filled
            filled = []
        filled.append(length)
    yield filled


def _best(plan: Plan, lengths: Sequence[int], filler: "_Filler") -> PackSchedule:
    """The fastest over numbers of micro-batches around and above the fewest that memory or the pipeline allows."""
    costs = filler.costs
    work = sum(costs.work_s(length) for length in lengths)
    fewest = max(plan.pp, sum(lengths) / (filler.num_ranks * filler.max_tokens))
    num = SWEEP_FROM * fewest
    found: list[PackSchedule] = []
    while num <= SWEEP_TO * fewest:
        batches = filler.fill(lengths, costs.fixed_s + work / (num * filler.num_ranks))
        found.append(PackSchedule(tuple(batches), filler.num_ranks, plan.pp, plan.vp))
        num *= SWEEP_FACTOR
    return min(found, key=lambda one: one.step_s)


@dataclass(frozen=True, slots=True)
class _Filler:
    """Fills micro-batches: groups for heavy documents by work, then light ones as long as time and memory allow."""

    costs: PackCosts
    num_ranks: int
    largest: int
    max_tokens: int

    def fill(self, lengths: Sequence[int], target_s: float) -> Iterator[MicroBatch]:
        """Micro-batches that take about ``target_s`` each, the heaviest documents first."""
        left = sorted(lengths, reverse=True)
        while left:
            groups, left = self._next(left, target_s)
            yield MicroBatch(tuple(RankPack(one.num_ranks, tuple(one.lengths), self._seconds(one)) for one in groups))

    def _next(self, lengths: list[int], target_s: float) -> tuple[list[_Group], list[int]]:
        """Groups of one micro-batch, and the documents left for later ones."""
        heaviest = self._open(lengths[0], target_s)
        limit_s = max(target_s, self._seconds(heaviest))
        groups, free, waiting = [heaviest], self.num_ranks - heaviest.num_ranks, []
        for length in lengths[1:]:
            group = self._open(length, limit_s) if free else None
            if group is None or group.num_ranks > free:
                waiting.append(length)
                continue
            groups.append(group)
            free -= group.num_ranks
        left = [length for length in waiting if not self._add(groups, length, limit_s)]
        if not left:
            self._widen(groups, free)
        return groups, left

    def _open(self, length: int, limit_s: float) -> _Group:
        """A group of the fewest ranks that hold the document and finish within the limit, or else the fastest."""
        fastest: _Group | None = None
        num_ranks = 1
        while num_ranks <= self.largest:
            if length <= num_ranks * self.max_tokens:
                group = _Group(num_ranks, [length], length, self.costs.attention_s(length, num_ranks))
                if self._seconds(group) <= limit_s:
                    return group
                if fastest is None or self._seconds(group) < self._seconds(fastest):
                    fastest = group
            num_ranks *= 2
        assert fastest is not None, "documents fit in the largest group"
        return fastest

    def _add(self, groups: list[_Group], length: int, limit_s: float) -> bool:
        """Put the document into the group that then ends first, if memory and the limit allow one."""
        best: _Group | None = None
        best_s, best_attention_s = limit_s, 0.0
        for group in groups:
            if group.num_tokens + length > group.num_ranks * self.max_tokens:
                continue
            attention_s = group.attention_s + self.costs.attention_s(length, group.num_ranks)
            seconds = self.costs.pack_s(group.num_tokens + length, attention_s, group.num_ranks)
            if seconds <= best_s:
                best, best_s, best_attention_s = group, seconds, attention_s
        if best is None:
            return False
        best.lengths.append(length)
        best.num_tokens, best.attention_s = best.num_tokens + length, best_attention_s
        return True

    def _widen(self, groups: list[_Group], free: int) -> None:
        """Give ranks that would be idle to the slowest pack, as long as that helps."""
        while True:
            slowest = max(groups, key=self._seconds)
            num_ranks = 2 * slowest.num_ranks
            if slowest.num_ranks > free or num_ranks > self.largest:
                return
            attention_s = sum(self.costs.attention_s(length, num_ranks) for length in slowest.lengths)
            if self.costs.pack_s(slowest.num_tokens, attention_s, num_ranks) >= self._seconds(slowest):
                return
            free -= slowest.num_ranks
            slowest.num_ranks, slowest.attention_s = num_ranks, attention_s

    def _seconds(self, group: _Group) -> float:
        return self.costs.pack_s(group.num_tokens, group.attention_s, group.num_ranks)
