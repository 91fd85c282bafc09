"""How many forward chunks a pipeline rank holds at once, from the schedule's own order (report section 1.5)."""

from functools import lru_cache

import numpy as np

from moeplan.pipeline_order import rank_order

# Full groups of micro-batches after which the interleaved schedule only repeats: a rank runs at most
# 2(pp - 1) + (vp - 1) x group forwards ahead, less than three groups of vp x group.
_DISTINCT_GROUPS = 4


def peak_counts(
    pp: int, vp: int, num_micro_batches: int, group_size: int | None, *, runs_ahead: bool = False
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each rank the states, as counts of micro-batches in flight by virtual stage, that can be its peak.

    Which of them is the peak depends on the bytes of each stage; states that another exceeds in every count are left
    out. ``runs_ahead``: one more forward, as where a forward and a backward run together (EP overlap, report
    section 1.5). Raises InvalidInputError where the schedule does not exist (report section 4.2).
    """
    group = pp if group_size is None else group_size
    if vp == 1:  # at most pp forwards run ahead
        return _peak_counts(pp, vp, min(num_micro_batches, pp + runs_ahead), group, runs_ahead)
    full, rest = divmod(num_micro_batches, group)
    return _peak_counts(pp, vp, min(full, _DISTINCT_GROUPS) * group + rest, group, runs_ahead)


@lru_cache(maxsize=1024)
def _peak_counts(
    pp: int,
    vp: int,
    num_micro_batches: int,
    group: int,
    runs_ahead: bool,  # noqa: FBT001 - cached by value
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(_maximal(_states(pp, vp, num_micro_batches, rank, group, runs_ahead)) for rank in range(pp))


def _states(  # noqa: PLR0917 - the schedule's own parameters
    pp: int,
    vp: int,
    num_micro_batches: int,
    rank: int,
    group: int,
    runs_ahead: bool,  # noqa: FBT001 - as above
) -> set[tuple[int, ...]]:
    """States after the forwards that a backward follows: those before it only grow.

    Running ahead, the forward that comes next in the order has begun as well.
    """
    counts, states = [0] * vp, set()
    previous = ""
    order = rank_order(pp, vp, num_micro_batches, rank, group)
    for place, step in enumerate(order):
        if step.kind == "B" and previous == "F":
            held = counts.copy()
            following = order[place + 1] if place + 1 < len(order) else step
            if runs_ahead and following.kind == "F":
                held[following.chunk] += 1
            states.add(tuple(held))
        counts[step.chunk] += 1 if step.kind == "F" else -1
        previous = step.kind
    return states


def _maximal(states: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    rows = np.array(sorted(states))
    covers = (rows[:, None, :] <= rows[None, :, :]).all(axis=2)  # covers[i, j]: state j has all that state i has
    return tuple(tuple(int(count) for count in row) for row in rows[covers.sum(axis=1) == 1])
