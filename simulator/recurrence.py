"""Exact pipeline time: the max-plus recurrence over chunks, for many plans of one order at once.

A forward of stage s and micro-batch m starts when its rank is free and the message from stage s-1 is there; a
backward when the rank is free and the gradient from stage s+1 is there (on the last stage: its own forward). Each rank
follows moeplan.pipeline_order. Uniform 1F1B gives (M + P - 1)(F + B).

Between warm-up and cool-down the order repeats with every group of micro-batches. Where all live times of two
successive groups differ by one constant, every later group adds the same constant, because the recurrence commutes
with a shift: those groups are skipped, exactly. Until then the same group is walked again and again, so the order is
worked out for KEPT_GROUPS groups only, however many micro-batches there are.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moeplan.pipeline_order import ChunkStep, rank_order

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
# Two successive groups count as shifted uniformly within this part of the shift: rounding of sums of doubles.
SHIFT_TOLERANCE_FRAC = 1e-12
KEPT_GROUPS = 5


@dataclass(frozen=True, slots=True)
class Level:
    """Chunks on different ranks that depend on no other of the same level. Indices into the arrays of a walk."""

    ranks: Indices
    durations: Indices  # 2 x stage, + 1 for a backward
    sources: Indices  # slot of the message each waits for; slot 0 is always there
    sends: Indices  # 1 where that message crosses ranks
    targets: Indices  # slot each writes


@dataclass(frozen=True, slots=True)
class CompiledOrder:
    """All levels of one (pp, vp, M, group). ``blocks`` are ranges of levels that repeat, block after block."""

    levels: tuple[Level, ...]
    num_slots: int
    blocks: tuple[tuple[int, int], ...]
    live_slots: tuple[Indices, ...]
    """After each block: slots written and not yet read, by kind, stage and micro-batch, so that their order repeats."""


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """``step_s`` (plans), ``end_s`` (plans, ranks): when each rank ends its last chunk; ``busy_s`` likewise."""

    step_s: Array
    end_s: Array
    busy_s: Array

    @property
    def bubble_s(self) -> Array:
        """Waiting of each rank until the last rank has ended, (plans, ranks)."""
        waiting: Array = self.step_s[:, None] - self.busy_s
        return waiting


def pipeline_time(
    order: tuple[int, int, int, int | None], forward_s: Array, backward_s: Array, send_s: Array
) -> PipelineTime:
    """Evaluate plans that share ``order`` = (pp, vp, num_micro_batches, group_size).

    ``forward_s`` and ``backward_s`` are (plans, stages) with stage k on rank k mod pp; ``send_s`` is (plans,), the
    time a message takes between neighbouring stages. Sending occupies neither rank.
    """
    pp, vp, num_micro_batches, group = order
    num_plans, num_stages = forward_s.shape
    # Plans are the last axis: the rows of one level are then contiguous.
    durations = np.ascontiguousarray(np.stack([forward_s, backward_s], axis=2).reshape(num_plans, 2 * num_stages).T)
    group = pp if group is None else group
    left_out = max(0, num_micro_batches // group - KEPT_GROUPS)
    compiled = compile_order(pp, vp, num_micro_batches - left_out * group, group)
    if left_out and not compiled.blocks:
        compiled, left_out = compile_order(pp, vp, num_micro_batches, group), 0
    free = walk(compiled, durations, send_s, pp, left_out)
    per_rank = (forward_s + backward_s).reshape(num_plans, vp, pp).sum(axis=1) * num_micro_batches
    end: Array = free.T
    return PipelineTime(end.max(axis=1), end, per_rank)


def walk(compiled: CompiledOrder, durations: Array, send_s: Array, pp: int, more_blocks: int = 0) -> Array:
    """When each rank is free after its last chunk, (ranks, plans).

    ``durations`` is (2 x stages, plans), forward and backward of stage 0 first. ``more_blocks``: how many further
    times the last block runs before the cool-down.
    """
    num_plans = durations.shape[1]
    free = np.zeros((pp, num_plans))
    slots = np.zeros((compiled.num_slots, num_plans))
    delays = np.stack([np.zeros(num_plans), send_s])

    def run(first: int, last: int) -> None:
        for level in compiled.levels[first:last]:
            ready = slots[level.sources] + delays[level.sends]
            end = np.maximum(free[level.ranks], ready) + durations[level.durations]
            free[level.ranks] = end
            slots[level.targets] = end

    blocks, live = compiled.blocks, compiled.live_slots
    if not blocks:
        run(0, len(compiled.levels))
        return free
    run(0, blocks[0][0])
    previous: Array | None = None
    for index in range(len(blocks) + more_blocks):
        at = min(index, len(blocks) - 1)
        if index > at:  # the last block again: its messages take the place of those of the block before
            slots[live[at - 1]] = slots[live[at]]
        run(*blocks[at])
        state = np.concatenate([free, slots[live[at]]])
        shift = None if previous is None else _uniform_shift(previous, state)
        if shift is not None:
            left = len(blocks) + more_blocks - 1 - index
            free += left * shift
            slots[live[-1]] = state[pp:] + left * shift
            break
        previous = state
    run(blocks[-1][1], len(compiled.levels))
    return free


def _uniform_shift(previous: Array, state: Array) -> Array | None:
    """What every live time grew by, (plans,), where that is one constant for each plan; otherwise None."""
    growth = state - previous
    smallest, largest = growth.min(axis=0), growth.max(axis=0)
    if np.all(largest - smallest <= SHIFT_TOLERANCE_FRAC * np.abs(state).max(axis=0)):
        shift: Array = growth.mean(axis=0)
        return shift
    return None


@dataclass(frozen=True, slots=True)
class _Placed:
    """One chunk with its place in a schedule of unit durations."""

    start: int
    rank: int
    step: ChunkStep


@lru_cache(maxsize=512)
def compile_order(pp: int, vp: int, num_micro_batches: int, group: int) -> CompiledOrder:
    """Levels, message slots and repeating blocks of one order.

    Levels are the instants of a schedule in which every chunk takes one unit: whatever the true durations, a chunk
    depends only on chunks of earlier levels.
    """
    placed = _unit_schedule(pp, vp, num_micro_batches, group)
    slot_of: dict[tuple[str, int, int], int] = {
        (one.step.kind, _stage(one, pp), one.step.micro_batch): i + 1 for i, one in enumerate(placed)
    }
    starts = [one.start for one in placed]
    bounds = [0, *(i for i in range(1, len(placed)) if starts[i] != starts[i - 1]), len(placed)]
    levels = tuple(_level(placed[first:last], slot_of, pp, pp * vp) for first, last in pairwise(bounds))
    blocks = _blocks(levels, [starts[first] for first in bounds[:-1]], placed, 2 * vp * group, bounds)
    live = _live_slots(levels, blocks, placed, pp, group)
    return CompiledOrder(levels, len(placed) + 1, blocks if live else (), live)


def _stage(one: _Placed, pp: int) -> int:
    return one.step.chunk * pp + one.rank


def _source(one: _Placed, pp: int, num_stages: int) -> tuple[str, int, int] | None:
    """The chunk whose result this one waits for."""
    stage, micro_batch = _stage(one, pp), one.step.micro_batch
    if one.step.kind == "F":
        return ("F", stage - 1, micro_batch) if stage else None
    return ("B", stage + 1, micro_batch) if stage < num_stages - 1 else ("F", stage, micro_batch)


def _level(placed: list[_Placed], slot_of: dict[tuple[str, int, int], int], pp: int, num_stages: int) -> Level:
    sources = [_source(one, pp, num_stages) for one in placed]
    sends = [
        int(pp > 1 and source is not None and source[1] % pp != one.rank)
        for one, source in zip(placed, sources, strict=True)
    ]
    return Level(
        ranks=np.array([one.rank for one in placed]),
        durations=np.array([2 * _stage(one, pp) + (one.step.kind == "B") for one in placed]),
        sources=np.array([0 if source is None else slot_of[source] for source in sources]),
        sends=np.array(sends),
        targets=np.array([slot_of[one.step.kind, _stage(one, pp), one.step.micro_batch] for one in placed]),
    )


def _unit_schedule(pp: int, vp: int, num_micro_batches: int, group: int) -> list[_Placed]:
    """Every chunk at the instant it starts when each takes one unit and messages take none, by instant and rank."""
    orders = [rank_order(pp, vp, num_micro_batches, rank, group) for rank in range(pp)]
    done: dict[tuple[str, int, int], int] = {}
    position, free = [0] * pp, [0] * pp
    placed: list[_Placed] = []
    total = sum(len(order) for order in orders)
    while len(placed) < total:
        before = len(placed)
        for rank in range(pp):
            while position[rank] < len(orders[rank]):
                step = orders[rank][position[rank]]
                one = _Placed(0, rank, step)
                source = _source(one, pp, pp * vp)
                if source is not None and source not in done:
                    break
                start = max(free[rank], 0 if source is None else done[source])
                placed.append(_Placed(start, rank, step))
                done[step.kind, _stage(one, pp), step.micro_batch] = free[rank] = start + 1
                position[rank] += 1
        assert len(placed) > before, "the pipeline order deadlocks"
    return sorted(placed, key=lambda one: (one.start, one.rank))


def _blocks(
    levels: tuple[Level, ...], starts: list[int], placed: list[_Placed], period: int, bounds: list[int]
) -> tuple[tuple[int, int], ...]:
    """The longest run of consecutive ranges of levels, each one ``period`` of instants long, with the same pattern."""
    by_start = {start: index for index, start in enumerate(starts)}
    pattern = [(tuple(level.ranks), tuple(level.durations)) for level in levels]
    best: tuple[tuple[int, int], ...] = ()
    run: list[tuple[int, int]] = []
    base: list[object] | None = None
    first = _first_backward(placed, bounds)
    start = starts[first]
    while start in by_start and start + period in by_start:
        low, high = by_start[start], by_start[start + period]
        shape: list[object] = [*pattern[low:high]]
        if shape != base:
            run, base = [], shape
        run.append((low, high))
        if len(run) > len(best):
            best = tuple(run)
        start += period
    return best if len(best) > 1 else ()


def _first_backward(placed: list[_Placed], bounds: list[int]) -> int:
    """Level in which rank 0 runs its first backward: by then every rank alternates."""
    for index, low in enumerate(bounds[:-1]):
        if any(one.rank == 0 and one.step.kind == "B" for one in placed[low : bounds[index + 1]]):
            return index
    raise AssertionError("an order without a backward")


def _live_slots(
    levels: tuple[Level, ...], blocks: tuple[tuple[int, int], ...], placed: list[_Placed], pp: int, group: int
) -> tuple[Indices, ...]:
    """Slots written and not yet read after each block; nothing where they are not those of the block before, later.

    Every message is read once, so what is unread after a block depends on the past alone.
    """
    chunk = np.array([-1, *(2 * _stage(one, pp) + (one.step.kind == "B") for one in placed)])
    micro_batch = np.array([0, *(one.step.micro_batch for one in placed)])
    written, read = np.full(len(chunk), len(levels)), np.full(len(chunk), -1)
    for index, level in enumerate(levels):
        written[level.targets] = index
        read[level.sources] = index
    live: list[Indices] = []
    pattern: NDArray[np.intp] | None = None
    for index, (_, last) in enumerate(blocks):
        slots = np.flatnonzero((written < last) & (read >= last))
        slots = slots[np.lexsort((micro_batch[slots], chunk[slots]))]
        moved = np.stack([chunk[slots], micro_batch[slots] - index * group])
        if pattern is not None and not np.array_equal(moved, pattern):
            return ()
        pattern = moved
        live.append(slots)
    return tuple(live)
