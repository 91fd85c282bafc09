"""Seconds of calls that do the same, compared at the clock that a GPU holds under load.

A GPU at its power limit lowers its clock by what it runs, within some 0.1 s, and drifts over minutes as it warms. So
each candidate has windows of its own, long enough for the limit to set its clock, the windows take turns, and the
median of the rounds counts; turns of a few calls favour what draws more power (docs/log.md, 2026-11-29).
"""

import math
import statistics
import warnings
from collections.abc import Callable, Mapping

import torch

WARM_UP_S = 1.0  # of load before the first round: an idle GPU begins above the clock that it can hold
SETTLE_S = 0.1  # of a candidate alone before its calls are timed: the power limit has set its clock by then
WINDOW_S = 0.15
NUM_ROUNDS = 3
HOPELESS = 1.1  # a candidate this many times slower than the best of the first round takes part in no other

Candidates = Mapping[str, Callable[[], object]]
# Mean seconds of so many calls in a row.
Timer = Callable[[Callable[[], object], int], float]


def runnable(candidates: Candidates) -> Candidates:
    """Those whose first call ends, with a warning for each other one: optional packages may not fit a machine.

    RuntimeError where none does.
    """
    found: dict[str, Callable[[], object]] = {}
    for name, run in candidates.items():
        try:
            run()
        except Exception as error:  # noqa: BLE001 - whatever a package of others raises
            warnings.warn(f"{name} is left out, as it does not run here: {error!r}", RuntimeWarning, stacklevel=2)
        else:
            found[name] = run
    if not found:
        raise RuntimeError(f"none of {', '.join(candidates)} runs here")
    return found


def compare(candidates: Candidates) -> dict[str, float]:
    """As :func:`under_load` of those that are :func:`runnable`; infinite seconds for each other one."""
    return dict.fromkeys(candidates, math.inf) | under_load(runnable(candidates))


def under_load(candidates: Candidates, timed: Timer | None = None) -> dict[str, float]:
    """Seconds a call of each: the median of its windows, or the only one where the first showed it hopeless.

    ``timed`` measures; without it CUDA events do.
    """
    timed = timed or cuda_timed
    if len(candidates) < 2:
        return {name: _window(run, _num_calls(run, timed), timed) for name, run in candidates.items()}
    return {name: statistics.median(some) for name, some in windows_under_load(candidates, timed).items()}


def windows_under_load(
    candidates: Candidates, timed: Timer | None = None, *, warm_up_s: float = WARM_UP_S
) -> dict[str, list[float]]:
    """Seconds a call of each in every round that it took part in, the first after ``warm_up_s`` of all of them."""
    timed = timed or cuda_timed
    num_calls = {name: _num_calls(run, timed) for name, run in candidates.items()}
    _warm_up(candidates, num_calls, timed, warm_up_s)
    times_s: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(NUM_ROUNDS):
        best_s = min((min(some) for some in times_s.values() if some), default=math.inf)
        for name, run in candidates.items():
            if not times_s[name] or times_s[name][0] <= HOPELESS * best_s:
                times_s[name].append(_window(run, num_calls[name], timed))
    return times_s


def _num_calls(run: Callable[[], object], timed: Timer) -> int:
    """Calls that fill a window; the first one compiles."""
    run()
    return max(1, math.ceil(WINDOW_S / max(timed(run, 1), 1e-6)))


def _warm_up(candidates: Candidates, num_calls: Mapping[str, int], timed: Timer, warm_up_s: float) -> None:
    spent_s = 0.0
    while spent_s < warm_up_s:
        for name, run in candidates.items():
            spent_s += timed(run, num_calls[name]) * num_calls[name]


def _window(run: Callable[[], object], num_calls: int, timed: Timer) -> float:
    timed(run, math.ceil(num_calls * SETTLE_S / WINDOW_S))
    return timed(run, num_calls)


def cuda_timed(run: Callable[[], object], num_calls: int) -> float:
    """Mean seconds of calls in a row, from the end of what was given before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / num_calls
