"""Predictions beside measured runs: one error a row, one a group, summaries of groups, and pairs of runs."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from moeplan.errors import MoeplanError
from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.planner.published_names import hardware_name, stack_name
from moeplan.planner.published_plan import plan_of
from moeplan.planner.published_rows import CellError, PublishedRow
from moeplan.simulator.memory import READINGS, Reading, peak_memory_bytes, peak_of_reading
from moeplan.simulator.predict import step_times
from moeplan.simulator.stack import SoftwareStack, load_stack


@dataclass(frozen=True, slots=True)
class RowScore:
    """One row predicted, or why not. Errors are predicted over published, less one; memory where it is usable."""

    row: PublishedRow
    published_step_s: float | None = None
    predicted_step_s: float | None = None
    predicted_peak_memory_bytes: float | None = None
    memory_error_frac: float | None = None
    rejected: str = ""

    @property
    def error_frac(self) -> float | None:
        """Predicted over published step time, less one: below 0 is too fast."""
        if self.predicted_step_s is None or self.published_step_s is None:
            return None
        return self.predicted_step_s / self.published_step_s - 1


@dataclass(frozen=True, slots=True)
class Case:
    """A row with everything its prediction needs."""

    row: PublishedRow
    plan: Plan
    published_step_s: float


@lru_cache(maxsize=64)
def profile_of(name: str) -> HardwareProfile:
    """A profile, read once."""
    return load_profile(name)


@lru_cache(maxsize=64)
def stack_of(name: str) -> SoftwareStack:
    """A stack, read once."""
    return load_stack(name)


def case_of(row: PublishedRow) -> Case:
    """The row as a plan with its measured step. Raises CellError."""
    plan = plan_of(row, stack_of(stack_name(row)), profile_of(hardware_name(row)))
    return Case(row, plan, row.step_s())


def score(row: PublishedRow) -> RowScore:
    """Predict one row; whatever is wrong with it becomes the reason it is rejected for."""
    try:
        case = case_of(row)
        profile, stack = profile_of(case.plan.hardware), stack_of(case.plan.stack)
        step_s = predicted_step_s(case, profile, stack)
        peak_bytes, memory_error = _memory(case, profile, stack)
    except CellError as error:
        return RowScore(row, rejected=f"line {row.line}: {error}")
    except MoeplanError as error:
        return RowScore(row, rejected=f"line {row.line}: {error.message}")
    return RowScore(row, case.published_step_s, step_s, peak_bytes, memory_error)


def predicted_step_s(case: Case, profile: HardwareProfile, stack: SoftwareStack) -> float:
    """Step time of the case's plan on the given machine and stack."""
    return step_times(case.plan.model, [case.plan.point], stack, profile)[0].step_s


def _memory(case: Case, profile: HardwareProfile, stack: SoftwareStack) -> tuple[float, float | None]:
    """Peak memory, and its error against a published one of a stated kind.

    Readings of allocated memory hold neither the allocator's reserve nor what is outside it, those of reserved memory
    only the reserve.
    """
    plan = case.plan
    peak = peak_memory_bytes(plan.model, plan.point, stack, profile)
    published_gb = case.row.positive("memory_gb")
    if published_gb is None or case.row.text("memory_usable") != "1":
        return peak, None
    compared = peak_of_reading(plan.model, plan.point, stack, profile, reading_of(case.row.text("memory_kind")))
    return peak, compared / (published_gb * 1e9) - 1


def reading_of(written: str) -> Reading:
    """Which counter a description of a memory reading names; allocated where it names none."""
    for reading in READINGS:
        if reading in written:
            return reading
    return "allocated"


@dataclass(frozen=True, slots=True)
class Summary:
    """Of groups: how many, part predicted, median and 90th percentile of the size of errors, median error (bias)."""

    num_groups: int
    coverage_frac: float
    median_frac: float
    p90_frac: float
    bias_frac: float


def group_errors(scores: Iterable[RowScore]) -> dict[str, float]:
    """Of every group the median error of its rows; infinite where any row of it could be predicted by none."""
    by_group: dict[str, list[float]] = defaultdict(list)
    for one in scores:
        found = by_group[one.row.group]
        if one.error_frac is not None:
            found.append(one.error_frac)
    return {group: median(errors) if errors else math.inf for group, errors in by_group.items()}


def summarize(errors: Sequence[float]) -> Summary:
    """Summary of one error a group; a rejected group is infinite, and counts so in median and percentile."""
    if not errors:
        return Summary(0, 0.0, math.nan, math.nan, math.nan)
    finite = [error for error in errors if math.isfinite(error)]
    sizes = sorted(abs(error) for error in errors)
    return Summary(
        len(errors),
        len(finite) / len(errors),
        median(sizes),
        percentile(sizes, 0.9),
        median(finite) if finite else math.nan,
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    """Value below which ``part`` of the ordered values lie, between neighbours in proportion."""
    position = part * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:
        return ordered[low]
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def summaries_by(scores: Sequence[RowScore], key: Callable[[PublishedRow], str]) -> dict[str, Summary]:
    """A summary for every value of ``key``, largest first."""
    parts: dict[str, list[RowScore]] = defaultdict(list)
    for one in scores:
        parts[key(one.row)].append(one)
    found = {name: summarize(list(group_errors(part).values())) for name, part in parts.items()}
    return dict(sorted(found.items(), key=lambda item: (-item[1].num_groups, item[0])))


@dataclass(frozen=True, slots=True)
class PairScore:
    """One published A/B pair: ratio of GPU-seconds per token of b over a, measured and predicted."""

    axis: str
    id_a: str
    id_b: str
    published_ratio: float | None
    predicted_ratio: float | None
    rejected: str = ""

    @property
    def is_right(self) -> bool | None:
        """Whether the predicted ratio lies on the measured side of 1; one that names neither half is wrong."""
        if self.published_ratio is None or self.predicted_ratio is None:
            return None
        return (self.published_ratio - 1) * (self.predicted_ratio - 1) > 0

    @property
    def error_frac(self) -> float | None:
        if self.published_ratio is None or self.predicted_ratio is None:
            return None
        return self.predicted_ratio / self.published_ratio - 1


def score_pairs(pairs: Iterable[PublishedRow], scores: Iterable[RowScore]) -> list[PairScore]:
    """Pairs of scored rows; one whose halves are not both predicted is rejected with the reason."""
    by_id = {one.row.id: one for one in scores}
    return [_pair(row, by_id) for row in pairs]


def _pair(row: PublishedRow, by_id: dict[str, RowScore]) -> PairScore:
    ids = row.text("id_a"), row.text("id_b")

    def rejected(reason: str) -> PairScore:
        return PairScore(row.text("axis"), *ids, None, None, f"line {row.line}: {reason}")

    seconds_per_token = []
    for name in ids:
        one = by_id.get(name)
        if one is None:
            return rejected(f"no row {name!r}")
        if one.predicted_step_s is None:
            return rejected(f"{name}: {one.rejected}")
        gpus, batch, seq_len = (one.row.count(column) for column in ("n_gpus", "gbs", "seq_len"))
        seconds_per_token.append(one.predicted_step_s * gpus / (batch * seq_len))
    try:
        published = row.positive("step_ratio")
    except CellError as error:
        return rejected(str(error))
    return PairScore(row.text("axis"), *ids, published, seconds_per_token[1] / seconds_per_token[0])
