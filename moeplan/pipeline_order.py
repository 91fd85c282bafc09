"""The order in which each pipeline rank runs its forward and backward chunks: 1F1B and interleaved 1F1B.

Simulator and executor both follow it (report section 1.5; Megatron's warm-up counts). A chunk is one virtual stage
for one micro-batch.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from moeplan.errors import InvalidInputError


class ChunkStep(NamedTuple):
    """One forward (F) or backward (B) of virtual stage ``chunk`` of a rank for ``micro_batch``."""

    kind: Literal["F", "B"]
    chunk: int
    micro_batch: int


def num_warmup_forwards(pp: int, vp: int, num_micro_batches: int, group_size: int, rank: int) -> int:
    """Forwards a rank runs before its first backward."""
    total = num_micro_batches * vp
    if pp == 1:
        return 0
    if vp == 1:
        return min(total, pp - rank - 1)
    return min(total, 2 * (pp - rank - 1) + (vp - 1) * group_size)


@lru_cache(maxsize=4096)
def rank_order(
    pp: int, vp: int, num_micro_batches: int, rank: int, group_size: int | None = None
) -> tuple[ChunkStep, ...]:
    """All steps of pipeline rank ``rank`` in order.

    ``group_size``: micro-batches a virtual stage runs in a row (default pp). Raises InvalidInputError where the
    interleaved schedule does not exist (report section 4.2).
    """
    group = pp if group_size is None else group_size
    problem = schedule_problem(pp, vp, num_micro_batches, group)
    if problem:
        raise InvalidInputError(problem, "change the global batch size, mbs, dp or vp")
    forwards = _interleaved(vp, num_micro_batches, group)
    backwards = [(vp - 1 - chunk, micro_batch) for chunk, micro_batch in forwards]
    warmup = num_warmup_forwards(pp, vp, num_micro_batches, group, rank)
    steps = [ChunkStep("F", *forward) for forward in forwards[:warmup]]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        steps += [ChunkStep("F", *forward), ChunkStep("B", *backward)]
    steps += [ChunkStep("B", *backward) for backward in backwards[len(backwards) - warmup :]]
    return tuple(steps)


class PairedStep(NamedTuple):
    """What a rank runs at once under expert-parallel overlap: a forward, an older backward, or both together."""

    forward: ChunkStep | None
    backward: ChunkStep | None


@lru_cache(maxsize=4096)
def paired_order(
    pp: int, vp: int, num_micro_batches: int, rank: int, group_size: int | None = None
) -> tuple[PairedStep, ...]:
    """The steps of :func:`rank_order` with each backward beside the forward that follows it there.

    One more forward runs before the first backward than without overlap, so that no pair waits for another rank's
    pair of the same instant (report section 2.5). Without a pipeline the first forward and the last backward are alone.
    """
    pairs: list[PairedStep] = []
    waiting: ChunkStep | None = None
    for step in rank_order(pp, vp, num_micro_batches, rank, group_size):
        if step.kind == "F":
            pairs.append(PairedStep(step, waiting))
            waiting = None
            continue
        if waiting is not None:
            pairs.append(PairedStep(None, waiting))
        waiting = step
    return (*pairs, PairedStep(None, waiting))


def schedule_problem(pp: int, vp: int, num_micro_batches: int, group_size: int) -> str:
    """Why no schedule exists for these counts, or the empty string."""
    if vp > 1 and pp == 1:
        return f"vp {vp} needs pp > 1"
    if num_micro_batches < 1:
        return "no micro-batch: the global batch size is below mbs x dp"
    if vp == 1:
        return ""
    if not pp <= group_size <= num_micro_batches:
        return f"interleaving needs at least pp {pp} micro-batches, got {num_micro_batches} (group size {group_size})"
    remainder = num_micro_batches % group_size
    if 0 < remainder < pp:
        return f"{num_micro_batches} micro-batches leave a last group of {remainder}, below pp {pp}"
    return ""


def _interleaved(vp: int, num_micro_batches: int, group: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of the forwards: groups of micro-batches pass through every chunk in turn."""
    order = []
    start = 0
    while start < num_micro_batches:
        # the last group takes what remains, so that no group is smaller than pp
        end = min(num_micro_batches, start + group)
        order += [(chunk, micro_batch) for chunk in range(vp) for micro_batch in range(start, end)]
        start = end
    return order
