"""What a training run takes on a cluster: days, GPU-hours, money, energy; and which of several clusters to rent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moeplan.hwprofiles.schema import HardwareProfile, Sourced
from moeplan.planner.search import SearchOutcome
from moeplan.results import Figures
from moeplan.units import DAY_S, HOUR_S, TFLOP
from moeplan.vocabulary import PRECISIONS, PrecisionName


@dataclass(frozen=True, slots=True)
class Job:
    """A training run to pay for. ``goodput_frac``: part of the time that steps take, failures and checkpoints aside.

    ``usd_per_gpu_hour``: prices by hardware name instead of the profiles', "" for all. None: no limit, or not asked.
    """

    tokens: float
    goodput_frac: float = 1.0
    deadline_s: float | None = None
    max_cost_usd: float | None = None
    usd_per_gpu_hour: Mapping[str, float] = field(default_factory=dict)
    usd_per_kwh: float | None = None


@dataclass(frozen=True, slots=True)
class Bill:
    """What a job takes on one cluster. ``price``: per GPU-hour, with its source; None where nobody says.

    ``energy_kwh``: every GPU at its power limit all the time, hosts, switches and cooling left out.
    """

    train_s: float
    gpu_hours: float
    price: Sourced | None
    cost_usd: float | None
    energy_kwh: float | None
    energy_usd: float | None


@dataclass(frozen=True, slots=True)
class Cluster:
    """One kind and number of GPUs, and what a search for it found.

    ``problem``: why there is no plan, or which limit the fastest one breaks.
    ``is_on_front``: no other cluster that will do is both as fast and as cheap.
    """

    hardware: str
    num_gpus: int
    profile: HardwareProfile
    outcome: SearchOutcome | None
    bill: Bill | None = None
    problem: str = ""
    is_on_front: bool = False


def peak_of(precision: PrecisionName, profile: HardwareProfile) -> Sourced | None:
    """Dense peak of the precision of most GEMMs; None where the profile has none."""
    wanted = PRECISIONS[precision].gemm_dtype
    return next((peak for dtype, peak in profile.peak_flops_per_s.items() if dtype == wanted), None)


def mfu_frac(predicted: Figures, precision: PrecisionName, profile: HardwareProfile) -> float | None:
    """Model FLOP/s over that peak."""
    peak = peak_of(precision, profile)
    return None if peak is None else predicted.model_tflops_per_gpu * TFLOP / peak.value


def bill_of(job: Job, predicted: Figures, num_gpus: int, hardware: str, profile: HardwareProfile) -> Bill:
    """Seconds = tokens / (tokens/s/GPU x GPUs) / goodput; the rest follows, by the profile's price and power."""
    train_s = job.tokens / (predicted.tokens_per_s_per_gpu * num_gpus) / job.goodput_frac
    gpu_hours = train_s * num_gpus / HOUR_S
    given = job.usd_per_gpu_hour.get(hardware, job.usd_per_gpu_hour.get(profile.name, job.usd_per_gpu_hour.get("")))
    price = profile.price_usd_per_gpu_hour
    if given is not None:
        price = Sourced(value=given, source="datasheet", ref="given with --price")
    energy = None if profile.power_watts is None else gpu_hours * profile.power_watts.value / 1000
    return Bill(
        train_s=train_s,
        gpu_hours=gpu_hours,
        price=price,
        cost_usd=None if price is None else gpu_hours * price.value,
        energy_kwh=energy,
        energy_usd=None if energy is None or job.usd_per_kwh is None else energy * job.usd_per_kwh,
    )


def shortfall(job: Job, bill: Bill) -> str:
    """Which limit of the job a bill breaks, with figures; nothing where it keeps all."""
    if job.deadline_s is not None and bill.train_s > job.deadline_s:
        return f"{bill.train_s / DAY_S:.1f} days, allowed: {job.deadline_s / DAY_S:g}"
    if job.max_cost_usd is not None:
        if bill.cost_usd is None:
            return "no price: give --price"
        if bill.cost_usd > job.max_cost_usd:
            return f"{bill.cost_usd:.4g} USD, allowed: {job.max_cost_usd:.4g}"
    return ""


def on_front(bills: Sequence[tuple[float, float]]) -> list[bool]:
    """Of (seconds, cost): whether no other one is at most as long and as dear, and less in one of them."""
    return [not any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in bills) for one in bills]
