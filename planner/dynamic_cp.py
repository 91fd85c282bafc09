"""Dynamic context parallelism: a group size for every pack of documents, chosen micro-batch by micro-batch.

Static context parallelism gives every pack the ranks that the longest document needs: short ones pay for a ring that
their attention does not hide, and packs of as many tokens differ in the sum of their squares, for which everybody
waits. Here heavy documents get more ranks and light ones share one (report section 6).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from moeplan.cp_schedule import Filler, MicroBatch, RankPack, largest_group, step_cost, tokens_by_size
from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.simulator.pack_costs import PackCosts
from moeplan.simulator.stack import SoftwareStack


@dataclass(frozen=True)
class PackSchedule:
    """Micro-batches of one step on ``num_ranks`` ranks (data x context parallel) of every pipeline stage."""

    micro_batches: tuple[MicroBatch, ...]
    num_ranks: int
    pp: int
    vp: int

    @cached_property
    def step_s(self) -> float:
        return step_cost(self.micro_batches, self.pp, self.vp)

    @property
    def waiting_frac(self) -> float:
        """Part of the ranks' time that waits for the slowest pack of its micro-batch."""
        busy_s = sum(pack.cost * pack.num_ranks for one in self.micro_batches for pack in one.packs)
        return max(0.0, 1 - busy_s / (self.num_ranks * sum(one.cost for one in self.micro_batches)))

    @property
    def tokens_by_size(self) -> dict[int, int]:
        """Tokens of packs by the number of ranks that share them, ascending."""
        return tokens_by_size(self.micro_batches)


@dataclass(frozen=True, slots=True)
class CpComparison:
    """One batch of documents under the plan's own cp, and under a cp chosen for each pack."""

    static: PackSchedule
    dynamic: PackSchedule
    max_tokens_per_rank: int

    @property
    def speed_up(self) -> float:
        return self.static.step_s / self.dynamic.step_s


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
    costs = PackCosts(plan, profile, stack)
    filler = Filler(costs, num_ranks, largest_group(min(max_cp or num_ranks, num_ranks)), tokens)
    _check(plan, lengths, filler)
    static = PackSchedule(tuple(_static(plan, lengths, costs)), num_ranks, plan.pp, plan.vp)
    found = (PackSchedule(batches, num_ranks, plan.pp, plan.vp) for batches in filler.sweep(lengths, plan.pp))
    return CpComparison(static, min(found, key=lambda one: one.step_s), tokens)


def _check(plan: Plan, lengths: Sequence[int], filler: Filler) -> None:
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
    filler.check(longest)


def _static(plan: Plan, lengths: Sequence[int], costs: PackCosts) -> Iterator[MicroBatch]:
    """Sequences filled in the order of the documents, as data loaders pack them; dp packs a micro-batch."""
    packs: list[RankPack] = []
    for pack in _filled_in_order(lengths, plan.mbs * plan.seq_len):
        attention_s = sum(costs.attention(length, plan.cp) for length in pack)
        packs.append(RankPack(plan.cp, tuple(pack), costs.pack(sum(pack), attention_s, plan.cp)))
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
