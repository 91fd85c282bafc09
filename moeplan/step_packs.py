"""A plan under dynamic context parallelism: the rules it keeps, and the packs of each step (report section 6)."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from moeplan.cp_schedule import Filler, FlopCost, MicroBatch, PlacedPack, flop_schedule, largest_group, placed
from moeplan.errors import InvalidInputError

if TYPE_CHECKING:
    from moeplan.plan import Plan

# Steps whose packs are remembered: all ranks' documents of the step under way, and of one that is being evaluated.
_REMEMBERED = 4


def dynamic_cp_violations(plan: "Plan") -> Iterator[tuple[str, str]]:
    """Each broken rule as (key, what was got and what is allowed), of a plan that is legal otherwise."""
    if not plan.dynamic_cp:
        for key in ("document_lengths", "max_tokens_per_rank"):
            if getattr(plan, key):
                yield key, "needs dynamic_cp = true"
        return
    if plan.cp_comm != "p2p":
        yield "cp_comm", f"dynamic_cp passes keys and values in rings of any size: allowed p2p, got {plan.cp_comm}"
    mixer, ranks = plan.model.linear_mixer, largest_group(plan.dp * plan.cp)
    # Packs have any power of two of ranks up to that.
    if mixer is not None and not all(mixer.splits_over(plan.tp, 1 << power) for power in range(ranks.bit_length())):
        yield "dynamic_cp", f"the heads of linear_mixer do not divide over tp {plan.tp} x packs of up to {ranks} ranks"
    if plan.packed_lengths:
        yield "packed_lengths", "are the same in every sequence: give dynamic_cp document_lengths instead"
    if plan.vp > 1:
        yield "vp", f"dynamic_cp varies the number of micro-batches, which interleaving fixes: allowed 1, got {plan.vp}"
    if plan.cuda_graph:
        yield "cuda_graph", "dynamic_cp changes the shapes of every micro-batch, which a graph fixes"
    yield from _length_violations(plan)


def _length_violations(plan: "Plan") -> Iterator[tuple[str, str]]:
    lengths = plan.document_lengths
    if not lengths:
        yield "document_lengths", "dynamic_cp needs the lengths of the documents of one step"
        return
    if max(lengths) > plan.seq_len:
        yield "document_lengths", f"document of {max(lengths)} tokens, allowed: at most seq_len {plan.seq_len}"
    if sum(lengths) != plan.tokens_per_step:
        yield (
            "document_lengths",
            (
                f"documents of {sum(lengths)} tokens in all, allowed: global_batch_size {plan.global_batch_size} x "
                f"seq_len {plan.seq_len} = {plan.tokens_per_step}"
            ),
        )
    tokens = tokens_per_rank(plan)
    if tokens % (2 * plan.tp):
        yield "max_tokens_per_rank", f"{tokens} tokens (0: mbs x seq_len / cp) are not a multiple of 2 x tp {plan.tp}"
    try:
        plan_filler(plan).check(max(lengths))
    except InvalidInputError as error:
        yield "document_lengths", error.message.removeprefix("lengths: ")


def tokens_per_rank(plan: "Plan") -> int:
    """Most tokens that a tp group holds in one micro-batch under dynamic_cp."""
    return plan.max_tokens_per_rank or plan.mbs * plan.seq_len // plan.cp


def plan_filler(plan: "Plan") -> Filler:
    """Packs for all data x context-parallel ranks of the plan, by model FLOPs."""
    num_ranks = plan.dp * plan.cp
    return Filler(FlopCost.of(plan.model), num_ranks, largest_group(num_ranks), tokens_per_rank(plan), plan.tp)


def step_schedule(plan: "Plan", lengths: tuple[int, ...]) -> tuple[MicroBatch, ...]:
    """Micro-batches of a step with documents of these lengths: the same on every rank that asks."""
    return _schedule(plan_filler(plan), tuple(sorted(lengths)), plan.pp)


@lru_cache(maxsize=_REMEMBERED)
def _schedule(filler: Filler, lengths: tuple[int, ...], pp: int) -> tuple[MicroBatch, ...]:
    return flop_schedule(filler, lengths, pp)


def step_packs(plan: "Plan", lengths: Sequence[int]) -> tuple[tuple[PlacedPack, ...], ...]:
    """Packs of each micro-batch of a step, on ranks, with documents by their place in ``lengths``."""
    return placed(step_schedule(plan, tuple(lengths)), lengths)
