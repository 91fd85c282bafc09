"""Search: memory as a hard wall, then time, then rank."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from moeplan.errors import InvalidInputError
from moeplan.plan import Plan
from moeplan.planner.request import SearchRequest
from moeplan.planner.space import Family, Tally, default_space, families
from moeplan.point import Point
from moeplan.results import Figures, Rejection
from moeplan.simulator.memory import peak_memory_bytes
from moeplan.simulator.predict import predict, step_times
from moeplan.vocabulary import RecomputeModule


@dataclass(frozen=True, slots=True)
class RankedPlan:
    """A plan with its prediction."""

    plan: Plan
    predicted: Figures


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """Ranked plans, best first; why the rest was turned down; how much was looked at.

    ``num_points`` counts candidates that exist on paper, ``num_costed`` those that fit and were timed; ``is_complete``
    says whether the whole space was covered.
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
    """State of one pass over the space."""

    request: SearchRequest
    wall: _MemoryWall
    tally: Tally = field(default_factory=Tally)
    fitting: list[Point] = field(default_factory=list)
    num_points: int = 0
    is_complete: bool = True


def search(request: SearchRequest, progress: Callable[[int, int], None] | None = None) -> SearchOutcome:
    """All legal plans that fit, the fastest ``request.top_k`` of them with full predictions.

    ``progress`` is told (candidates seen, candidates that fit) now and then. Raises InvalidInputError where ``--fix``
    leaves nothing legal; an outcome without plans means that nothing fits in memory.
    """
    started_s = time.monotonic()
    sweep = _sweep(request, started_s, progress)
    if not sweep.fitting and not sweep.wall.count:
        _raise_illegal(sweep)
    times = step_times(request.model, sweep.fitting, request.stack, request.profile)
    order = sorted(
        range(len(times)), key=lambda index: (times[index].step_s, sweep.fitting[index].as_dict().__repr__())
    )
    plans = tuple(_ranked(request, sweep.fitting[index]) for index in order[: request.top_k])
    return SearchOutcome(
        plans=plans,
        rejections=_rejections(sweep),
        num_points=sweep.num_points + sum(sweep.tally.counts.values()),
        num_costed=len(sweep.fitting),
        seconds=time.monotonic() - started_s,
        is_complete=sweep.is_complete,
    )


def _sweep(request: SearchRequest, started_s: float, progress: Callable[[int, int], None] | None) -> _Sweep:
    sweep = _Sweep(request, _MemoryWall(request.profile.memory_bytes.value))
    for by_mbs in families(request, default_space(request), sweep.tally):
        if request.time_limit_s is not None and time.monotonic() - started_s > request.time_limit_s:
            sweep.is_complete = False
            break
        for family in by_mbs:
            if not _add_fitting(sweep, family):
                break  # a larger micro-batch needs no less memory
        if progress is not None:
            progress(sweep.num_points, len(sweep.fitting))
    return sweep


def _add_fitting(sweep: _Sweep, family: Family) -> bool:
    """Keep the points of ``family`` that fit and are not beaten by a smaller set of recomputed modules that fits."""
    points = list(family.points())
    sweep.num_points += len(points)
    lightest, needed = points[-1], _needed_bytes(sweep, points[-1])  # the last set recomputes most
    if needed > sweep.wall.available_bytes:
        sweep.wall.add(needed, lightest)
        return False
    kept: list[set[RecomputeModule]] = []
    for point in points[:-1]:
        chosen = set(point.recompute)
        beaten = any(smaller <= chosen for smaller in kept)  # recomputing more only takes longer
        if not beaten and _needed_bytes(sweep, point) <= sweep.wall.available_bytes:
            sweep.fitting.append(point)
            kept.append(chosen)
    if not kept:
        sweep.fitting.append(lightest)
    return True


def _needed_bytes(sweep: _Sweep, point: Point) -> float:
    request = sweep.request
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
    return f"{degrees} mbs{point.mbs} {point.precision} {dispatcher} recompute {recompute}"
