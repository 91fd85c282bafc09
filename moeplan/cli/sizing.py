"""``moeplan search`` over several clusters, and what a training run takes on one."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from moeplan.cli.quantities import parse_count, parse_prices, parse_time
from moeplan.errors import InfeasibleError, InvalidInputError
from moeplan.planner.request import SearchRequest
from moeplan.planner.search import SearchOutcome
from moeplan.planner.sizing import Bill, Cluster, Job, bill_of, mfu_frac, on_front, shortfall
from moeplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of a training run, as typed."""

    tokens: str = ""
    deadline: str = ""
    max_cost: str = ""
    price: str = ""
    energy_price: float | None = None
    goodput: float = 1.0


def read_job(options: JobOptions, hardware: Sequence[str]) -> Job | None:
    """The job, or None where no tokens are given. Raises InvalidInputError for limits without them."""
    prices = parse_prices(options.price, "--price")
    unknown = [name for name in prices if name and name not in hardware]
    if unknown:
        raise InvalidInputError(
            f"--price: got {unknown[0]!r}, allowed: a number for all, or {', '.join(hardware)} of --hardware",
            f"for example {hardware[0]}=2.5",
        )
    if not options.tokens:
        asked = [name for name in ("deadline", "max_cost", "price", "energy_price") if getattr(options, name)]
        if asked:
            raise InvalidInputError(f"--{asked[0].replace('_', '-')} needs --tokens", "for example --tokens 14.8T")
        return None
    return Job(
        tokens=parse_count(options.tokens, "--tokens"),
        goodput_frac=options.goodput,
        deadline_s=parse_time(options.deadline, "--deadline") if options.deadline else None,
        max_cost_usd=parse_count(options.max_cost, "--max-cost") if options.max_cost else None,
        usd_per_gpu_hour=prices,
        usd_per_kwh=options.energy_price,
    )


def cluster_of(request: SearchRequest, outcome: SearchOutcome, job: Job | None) -> Cluster:
    """What a search found, with the job's bill and the limit that it breaks."""
    cluster = Cluster(request.hardware, request.num_gpus, request.profile, outcome)
    if not outcome.plans:
        return replace(cluster, problem=why_nothing_fits(outcome)[0])
    if job is None:
        return cluster
    bill = bill_of(job, outcome.plans[0].predicted, request.num_gpus, request.hardware, request.profile)
    return replace(cluster, bill=bill, problem=shortfall(job, bill))


def ranked(clusters: Sequence[Cluster]) -> list[Cluster]:
    """Those that will do first: the cheapest (by GPU-hours where a price is missing), or the fastest without a job."""
    usable = [one for one in clusters if not one.problem]
    priced = all(one.bill is not None and one.bill.cost_usd is not None for one in usable)
    both = [_time_and_cost(one, by_price=priced) for one in usable]
    marked = [replace(one, is_on_front=is_on) for one, is_on in zip(usable, on_front(both), strict=True)]

    def order(one: Cluster) -> tuple[float, float]:
        seconds, cost = _time_and_cost(one, by_price=priced)
        return (seconds, cost) if one.bill is None else (cost, seconds)

    others = [one for one in clusters if one.problem]
    return [*sorted(marked, key=order), *sorted(others, key=lambda one: one.bill is None)]


def _time_and_cost(cluster: Cluster, *, by_price: bool) -> tuple[float, float]:
    """Seconds and USD (or GPU-hours) of the job; without one, seconds a token and GPUs."""
    bill = cluster.bill
    if bill is not None:
        return bill.train_s, bill.cost_usd if by_price and bill.cost_usd is not None else bill.gpu_hours
    plans = cluster.outcome.plans if cluster.outcome is not None else ()
    return 1 / (plans[0].predicted.tokens_per_s_per_gpu * cluster.num_gpus), float(cluster.num_gpus)


def why_nothing_fits(outcome: SearchOutcome) -> tuple[str, str]:
    """Message and hint of a search without plans."""
    memory = next(rejection for rejection in outcome.rejections if rejection.wall == "memory")
    needed, available = format_bytes(memory.needed or 0), format_bytes(memory.available or 0)
    return (
        f"no plan fits: the nearest of {memory.count} ({memory.nearest_miss}) needs {needed} of {available}",
        _what_would_fit(outcome, memory.available or 0),
    )


def _what_would_fit(outcome: SearchOutcome, available_bytes: float) -> str:
    """Settings under which the nearest miss fits, or the one that comes nearest; and more GPUs."""
    fitting = [one for one in outcome.reliefs if one.needed_bytes <= available_bytes]
    nearest = fitting[:2] or sorted(outcome.reliefs, key=lambda one: one.needed_bytes)[:1]
    said = " or ".join(f"--fix {one.pins} ({format_bytes(one.needed_bytes)})" for one in nearest)
    more = "more GPUs: several sizes in --gpus, with commas, are compared"
    if fitting:
        return f"that one fits with {said}; or take {more}"
    return f"take {more}" + (f"; even {said} is not enough" if said else "")


def raise_unless_one_will_do(clusters: Sequence[Cluster]) -> None:
    """InfeasibleError with the first cluster's problem where every one has one."""
    if all(one.problem for one in clusters):
        first = clusters[0]
        raise InfeasibleError(
            f"no cluster will do: {first.num_gpus} x {first.hardware}: {first.problem}",
            "allow more days or money, or more GPUs in --gpus",
        )


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    """One cluster for programs: seconds, bytes, USD, kWh."""
    document: dict[str, Any] = {
        "hardware": cluster.hardware,
        "num_gpus": cluster.num_gpus,
        "problem": cluster.problem,
        "is_on_front": cluster.is_on_front,
        "bill": bill_json(cluster.bill),
    }
    plans = cluster.outcome.plans if cluster.outcome is not None else ()
    if plans:
        best = plans[0]
        document |= {
            "plan_id": best.plan.plan_id,
            "plan": best.plan.model_dump(mode="json"),
            "predicted": best.predicted.model_dump(mode="json"),
            "mfu_frac": mfu_frac(best.predicted, best.plan.precision, cluster.profile),
        }
    return document


def bill_json(bill: Bill | None) -> dict[str, Any] | None:
    """A bill for programs."""
    if bill is None:
        return None
    price = None if bill.price is None else bill.price.model_dump(mode="json", exclude_none=True)
    return asdict(bill) | {"price": price}
