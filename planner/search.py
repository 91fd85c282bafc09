"""Search: memory as a hard wall, then best-first by time, exact for the plans it returns but for their layouts.

Time without recompute is a lower bound of a family's time with any, and what its chunks take without messages,
reduction and optimizer one of that. Families are opened in the order of that bound until the plans found beat all that
is left. Memory is looked at where it can matter: parameters' state first, which alone rules most out, the rest when a
family is opened. All points have the report's layout; those found take a better one where there is one (layouts.py).
"""

import gc
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from moeplan.errors import InvalidInputError
from moeplan.plan import Plan
from moeplan.planner.families import Family, Tally, families
from moeplan.planner.layouts import best_layouts
from moeplan.planner.relief import Relief, reliefs
from moeplan.planner.request import SearchRequest
from moeplan.planner.space import default_space
from moeplan.point import Point
from moeplan.results import Figures, Rejection
from moeplan.simulator.memory import peak_memory_bytes, state_bytes
from moeplan.simulator.predict import predict, step_times
from moeplan.simulator.step_model import step_model
from moeplan.units import format_seconds
from moeplan.vocabulary import RecomputeModule

NUM_OPENED_AT_ONCE = 64  # families whose points are costed together; larger wastes work past the last useful one
# Where state leaves less than the rest of memory, most ladders fit at no size: cheaper to see before they are timed.
LIGHT_STATE_FRAC = 0.5
_ROUNDING = 1 - 1e-9  # the bound and the step add the same seconds in another order


@dataclass(frozen=True, slots=True)
class RankedPlan:
    """A plan with its prediction."""

    plan: Plan
    predicted: Figures


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """Ranked plans, best first; why the rest was turned down; how much was looked at.

    ``num_points`` counts candidates that exist on paper, ``num_costed`` those that were timed; the rest was ruled out
    by a rule, by memory or by the bound. ``is_complete`` says whether the whole space was covered.
    ``reliefs``: where nothing fits, what settings that were not searched would do for the nearest miss.
    """

    plans: tuple[RankedPlan, ...]
    rejections: tuple[Rejection, ...]
    num_points: int
    num_costed: int
    seconds: float
    is_complete: bool
    reliefs: tuple[Relief, ...] = ()


@dataclass(slots=True)
class _MemoryWall:
    """Families that no recompute set makes fit, and the one that came nearest of those that were looked at."""

    available_bytes: float
    count: int = 0
    nearest_bytes: float = float("inf")
    nearest: Point | None = None
    state_alone: list[tuple[float, Point]] = field(default_factory=list)

    def add(self, needed_bytes: float, point: Point, count: int = 1) -> None:
        """Count ``count`` families, of which ``point`` is the lightest."""
        self.count += count
        if needed_bytes < self.nearest_bytes:
            self.nearest_bytes, self.nearest = needed_bytes, point


@dataclass(slots=True)
class _Ladder:
    """Families that differ in micro-batch size only, rising; those from ``end`` on are known not to fit."""

    families: tuple[Family, ...]
    end: int


@dataclass(slots=True)
class _Sweep:
    """What one pass over the space found: ladders whose state fits, and why the others do not."""

    request: SearchRequest
    wall: _MemoryWall
    started_s: float
    progress: Callable[[str], None]
    tally: Tally = field(default_factory=Tally)
    ladders: list[_Ladder] = field(default_factory=list)
    num_points: int = 0
    num_costed: int = 0
    num_slower: int = 0
    is_complete: bool = True

    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        limit_s = self.request.time_limit_s
        return limit_s is not None and time.monotonic() - self.started_s > limit_s


def search(request: SearchRequest, progress: Callable[[str], None] = lambda _: None) -> SearchOutcome:
    """The fastest ``request.top_k`` legal plans that fit, with full predictions.

    ``progress`` is told now and then what is done. Raises InvalidInputError where ``--fix`` leaves nothing legal; an
    outcome without plans means that nothing fits in memory.
    """
    sweep = _Sweep(request, _MemoryWall(request.usable_bytes), time.monotonic(), progress)
    with _no_garbage_collection():
        _collect(sweep)
        if not sweep.ladders and not sweep.wall.count:
            _raise_illegal(sweep)
        best = _best_points(sweep)
        _settle_nearest(sweep.wall, request)
    plans = tuple(_ranked(request, point) for point in best)
    return SearchOutcome(
        plans=plans,
        rejections=_rejections(sweep, plans),
        num_points=sweep.num_points + sum(sweep.tally.counts.values()),
        num_costed=sweep.num_costed,
        seconds=time.monotonic() - sweep.started_s,
        is_complete=sweep.is_complete,
        reliefs=reliefs(request, sweep.wall.nearest) if sweep.wall.nearest is not None and not plans else (),
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Points and ops are made by the thousand and never refer back: looking for cycles took a fifth of a search."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _collect(sweep: _Sweep) -> None:
    """All legal ladders, but for those whose parameters' state alone is more than memory."""
    request, wall = sweep.request, sweep.wall
    state: dict[tuple[object, ...], float] = {}
    for by_mbs in families(request, default_space(request), sweep.tally):
        if sweep.is_over():
            sweep.is_complete = False
            break
        if not by_mbs:
            continue
        sweep.num_points += sum(len(family.recompute) for family in by_mbs)
        base = by_mbs[0].base
        key = (base.tp, base.cp, base.etp, base.ep, base.layout, base.pp, base.precision)
        if key not in state:
            state[key] = state_bytes(request.model, base, request.stack, request.profile)
        if state[key] > wall.available_bytes:
            wall.count += len(by_mbs)
            wall.state_alone.append((state[key], by_mbs[0].lightest))
            continue
        ladder = _Ladder(tuple(by_mbs), len(by_mbs))
        if state[key] < LIGHT_STATE_FRAC * wall.available_bytes or _fits(sweep, ladder, 0):
            sweep.ladders.append(ladder)
        sweep.progress(f"{sweep.num_points} plans")


def _best_points(sweep: _Sweep) -> list[Point]:
    """The ``top_k`` fastest points that fit, best first; ties by their fields, so that a search repeats itself."""
    request = sweep.request
    waiting = _by_bound(sweep)
    best: list[tuple[float, str, Point]] = []
    while waiting:
        if len(best) == request.top_k and waiting[0][0] > best[-1][0]:
            sweep.num_slower = len(waiting)
            break
        if best and sweep.is_over():
            sweep.is_complete = False
            break
        block = [heapq.heappop(waiting) for _ in range(min(NUM_OPENED_AT_ONCE, len(waiting)))]
        points = [point for _, index, place in block for point in _opened(sweep, sweep.ladders[index], place)]
        found = zip(_times(sweep, points), points, strict=True)
        best += [(step_s, repr(point.as_dict()), point) for step_s, point in found]
        best = sorted(best, key=lambda one: one[:2])[: request.top_k]
        sweep.progress(f"{sweep.num_points} plans, {sweep.num_costed} costed, {len(waiting)} families left")
    return [point for _, point in best_layouts(request, [(step_s, point) for step_s, _, point in best])]


def _by_bound(sweep: _Sweep) -> list[tuple[float, int, int]]:
    """A heap of (least seconds of a step, ladder, place in it)."""
    request = sweep.request
    model = step_model(request.model, request.stack, request.profile)
    waiting: list[tuple[float, int, int]] = []
    for index, ladder in enumerate(sweep.ladders):
        if waiting and sweep.is_over():
            sweep.is_complete = False
            break
        for place, family in enumerate(ladder.families):
            waiting.append((model.least_step_s(family.base) * _ROUNDING, index, place))
        sweep.progress(f"{sweep.num_points} plans, bound of {index + 1} of {len(sweep.ladders)} families")
    heapq.heapify(waiting)
    return waiting


def _opened(sweep: _Sweep, ladder: _Ladder, place: int) -> Iterator[Point]:
    """Points to cost of one family: none where it, or one of smaller micro-batches, does not fit."""
    if place < ladder.end and _fits(sweep, ladder, place):
        yield from _fitting_points(sweep.request, ladder.families[place])


def _fits(sweep: _Sweep, ladder: _Ladder, place: int) -> bool:
    """Whether a family fits with the most recompute; if not, it and those of larger micro-batches are turned down."""
    lightest = ladder.families[place].lightest
    needed = _needed_bytes(sweep.request, lightest)
    if needed > sweep.wall.available_bytes:
        sweep.wall.add(needed, lightest, ladder.end - place)
        ladder.end = place
    return place < ladder.end


def _settle_nearest(wall: _MemoryWall, request: SearchRequest) -> None:
    """Of points turned down by their state alone, look at those that may come nearer than the nearest so far."""
    for state, point in sorted(wall.state_alone, key=lambda one: one[0]):
        if state >= wall.nearest_bytes:
            break
        wall.add(_needed_bytes(request, point), point, 0)


def _times(sweep: _Sweep, points: Sequence[Point]) -> list[float]:
    sweep.num_costed += len(points)
    request = sweep.request
    return [found.step_s for found in step_times(request.model, points, request.stack, request.profile)]


def _fitting_points(request: SearchRequest, family: Family) -> Iterator[Point]:
    """Points of ``family`` that fit and are not beaten by a smaller set of recomputed modules that fits."""
    kept: list[set[RecomputeModule]] = []
    for point in family.points():
        chosen = set(point.recompute)
        if any(smaller <= chosen for smaller in kept) or (kept and "full" in chosen):
            continue  # recomputing more only takes longer
        if _needed_bytes(request, point) <= request.usable_bytes:
            kept.append(chosen)
            yield point


def _needed_bytes(request: SearchRequest, point: Point) -> float:
    return peak_memory_bytes(request.model, point, request.stack, request.profile)


def _ranked(request: SearchRequest, point: Point) -> RankedPlan:
    plan = to_plan(request, point)
    return RankedPlan(plan, predict(plan, request.profile, request.stack))


def to_plan(request: SearchRequest, point: Point) -> Plan:
    """The point as a complete, checked plan."""
    return Plan(model=request.model, hardware=request.hardware, stack=request.stack.name, **point.as_dict())


def _raise_illegal(sweep: _Sweep) -> None:
    request, tally = sweep.request, sweep.tally
    if not sweep.is_complete:
        raise InvalidInputError(
            f"no plan was costed within the time limit of {request.time_limit_s:g} s", "allow more with --time-limit"
        )
    examples = [message for key, message in tally.examples.items() if key != "forbidden"]
    what = ", ".join(f"{key}={value}" for key, value in request.fixed.items()) or "any degrees"
    reasons = "; ".join(examples[:3]) or "--forbid leaves nothing"
    raise InvalidInputError(f"no legal plan with {what}: {reasons}", "loosen --fix or change the number of GPUs")


def _rejections(sweep: _Sweep, plans: Sequence[RankedPlan]) -> tuple[Rejection, ...]:
    found = []
    wall = sweep.wall
    if wall.nearest is not None:
        found.append(
            Rejection(
                wall="memory",
                count=wall.count,
                needed=wall.nearest_bytes,
                available=wall.available_bytes,
                unit="bytes",
                nearest_miss=short_form(wall.nearest),
            )
        )
    if sweep.num_slower:
        last = format_seconds(plans[-1].predicted.step_s)
        rule = f"slower than {last}, the last plan printed, even without messages, reduction and recompute"
        found.append(Rejection(wall="time", count=sweep.num_slower, nearest_miss=rule))
    for key, count in sweep.tally.counts.most_common():
        found.append(Rejection(wall=key, count=count, nearest_miss=sweep.tally.examples[key]))
    return tuple(found)


def short_form(point: Point) -> str:
    """A point in one line: the degrees above 1, micro-batch, precision, dispatcher, recompute."""
    axes = ("tp", "cp", "dp", "pp", "vp", "etp", "ep", "edp")
    degrees = " ".join(f"{axis}{getattr(point, axis)}" for axis in axes if getattr(point, axis) > 1) or "one GPU"
    dispatcher = point.flex_backend if point.dispatcher == "flex" else point.dispatcher
    recompute = "+".join(point.recompute) or "none"
    if point.cp_comm != "p2p":
        degrees += f" {point.cp_comm}"
    return f"{degrees} mbs{point.mbs} {point.precision} {dispatcher} recompute {recompute}"
