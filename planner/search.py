"""Search: memory as a hard wall, then best-first by time, exact for the plans it returns.

Time without recompute is a lower bound of a family's time with any, so families are opened in the order of that bound
until the plans found beat all that is left.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moeplan.errors import InvalidInputError
from moeplan.plan import Plan
from moeplan.planner.families import Family, Tally, families
from moeplan.planner.request import SearchRequest
from moeplan.planner.space import default_space
from moeplan.point import Point
from moeplan.results import Figures, Rejection
from moeplan.simulator.memory import peak_memory_bytes
from moeplan.simulator.predict import predict, step_times
from moeplan.vocabulary import RecomputeModule

NUM_OPENED_AT_ONCE = 64  # families whose points are costed together; larger wastes work past the last useful one


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
    """

    plans: tuple[RankedPlan, ...]
    rejections: tuple[Rejection, ...]
    num_points: int
    num_costed: int
    seconds: float
    is_complete: bool


@dataclass(slots=True)
class _MemoryWall:
    """Families that no recompute set makes fit, and the one that came nearest."""

    available_bytes: float
    count: int = 0
    nearest_bytes: float = float("inf")
    nearest: Point | None = None

    def add(self, needed_bytes: float, point: Point) -> None:
        self.count += 1
        if needed_bytes < self.nearest_bytes:
            self.nearest_bytes, self.nearest = needed_bytes, point


@dataclass(slots=True)
class _Sweep:
    """What one pass over the space found: families that fit with the most recompute, and why the others do not."""

    request: SearchRequest
    wall: _MemoryWall
    tally: Tally = field(default_factory=Tally)
    fitting: list[Family] = field(default_factory=list)
    num_points: int = 0
    num_costed: int = 0
    is_complete: bool = True


def search(request: SearchRequest, progress: Callable[[int, int], None] | None = None) -> SearchOutcome:
    """The fastest ``request.top_k`` legal plans that fit, with full predictions.

    ``progress`` is told (candidates seen, families that fit) now and then. Raises InvalidInputError where ``--fix``
    leaves nothing legal; an outcome without plans means that nothing fits in memory.
    """
    started_s = time.monotonic()
    sweep = _sweep(request, started_s, progress)
    if not sweep.fitting and not sweep.wall.count:
        _raise_illegal(sweep)
    best = _best_points(sweep)
    return SearchOutcome(
        plans=tuple(_ranked(request, point) for point in best),
        rejections=_rejections(sweep),
        num_points=sweep.num_points + sum(sweep.tally.counts.values()),
        num_costed=sweep.num_costed,
        seconds=time.monotonic() - started_s,
        is_complete=sweep.is_complete,
    )


def _sweep(request: SearchRequest, started_s: float, progress: Callable[[int, int], None] | None) -> _Sweep:
    sweep = _Sweep(request, _MemoryWall(request.usable_bytes))
    for by_mbs in families(request, default_space(request), sweep.tally):
        if request.time_limit_s is not None and time.monotonic() - started_s > request.time_limit_s:
            sweep.is_complete = False
            break
        for family in by_mbs:
            sweep.num_points += len(family.recompute)
            lightest = family.lightest
            needed = _needed_bytes(request, lightest)
            if needed > sweep.wall.available_bytes:
                sweep.wall.add(needed, lightest)
                break  # a larger micro-batch needs no less memory
            sweep.fitting.append(family)
        if progress is not None:
            progress(sweep.num_points, len(sweep.fitting))
    return sweep


def _best_points(sweep: _Sweep) -> list[Point]:
    """The ``top_k`` fastest points that fit, best first; ties by their fields, so that a search repeats itself."""
    request = sweep.request
    bounds = _times(sweep, [family.base for family in sweep.fitting])
    order = sorted(range(len(bounds)), key=bounds.__getitem__)
    best: list[tuple[float, str, Point]] = []
    for start in range(0, len(order), NUM_OPENED_AT_ONCE):
        block = order[start : start + NUM_OPENED_AT_ONCE]
        if len(best) == request.top_k and bounds[block[0]] > best[-1][0]:
            break
        points = [point for index in block for point in _fitting_points(request, sweep.fitting[index])]
        found = zip(_times(sweep, points), points, strict=True)
        best += [(step_s, repr(point.as_dict()), point) for step_s, point in found]
        best = sorted(best, key=lambda one: one[:2])[: request.top_k]
    return [point for _, _, point in best]


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


def _rejections(sweep: _Sweep) -> tuple[Rejection, ...]:
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
