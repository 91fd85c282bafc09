"""Verdicts on reported cases: what moeplan says of each, and whether the people who ran it saw the same."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from moeplan.errors import InvalidInputError, MoeplanError
from moeplan.flops import training_flops_per_token
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.planner.case_plan import CaseSetting, plan_of_case, setting_of
from moeplan.planner.published_rows import CellError, PublishedRow
from moeplan.planner.request import MEMORY_MARGIN_FRAC
from moeplan.planner.scoring import profile_of, stack_of
from moeplan.simulator.memory import memory_by_rank, peak_of_reading
from moeplan.simulator.placement import rank_elements
from moeplan.simulator.predict import step_times
from moeplan.simulator.stack import SoftwareStack
from moeplan.units import GB, GIB, MB, TFLOP, format_bytes
from moeplan.vocabulary import PRECISIONS

CASE_COLUMNS = ("id", "kind", "model", "gpu", "n_gpus", "precision", "outcome", "expected")
FITS, OOM, REFUSED = "fits", "oom", "rejected"


@dataclass(frozen=True, slots=True)
class CaseScore:
    """One case. ``outcome``: as reported; ``verdict``: moeplan's; ``why``: the figures or the rule behind it.

    ``left_out``: why a case could not be expressed. ``predicted`` and ``reported`` share the unit of the case.
    """

    row: PublishedRow
    verdict: str = ""
    why: str = ""
    left_out: str = ""
    reported: float | None = None
    predicted: float | None = None

    @property
    def outcome(self) -> str:
        return self.row.text("outcome")

    @property
    def is_legality(self) -> bool:
        """Whether the case asks if a plan is allowed, not if it fits."""
        return self.row.id.startswith("C") or self.outcome == REFUSED

    @property
    def is_right(self) -> bool | None:
        """Whether the verdict is the reported one. A run that was timed must have fit; None where none is known.

        A case that may be refused or padded is right either way.
        """
        if self.left_out:
            return None
        if self.verdict == FITS and self.outcome == REFUSED and "auto-pad" in self.row.text("expected"):
            return True
        return self.verdict == (FITS if self.outcome == "throughput" else self.outcome)

    @property
    def error_frac(self) -> float | None:
        """Predicted over reported, less one."""
        if self.predicted is None or not self.reported:
            return None
        return self.predicted / self.reported - 1


@dataclass(frozen=True, slots=True)
class CaseSummary:
    """Counts of right verdicts. Balanced accuracy: the mean of both shares, of what ran out of memory and what fit."""

    oom_right: int
    oom: int
    fits_right: int
    fits: int
    legality_right: int
    legality: int
    timed_right: int
    timed: int
    left_out: int

    @property
    def balanced_accuracy_frac(self) -> float:
        if not self.oom or not self.fits:
            return math.nan
        return (self.oom_right / self.oom + self.fits_right / self.fits) / 2


def score_case(row: PublishedRow) -> CaseScore:
    """The verdict on one case; whatever cannot be expressed becomes the reason it is left out."""
    try:
        return _judge(row)
    except CellError as error:
        return CaseScore(row, left_out=f"line {row.line}: {error}")
    except MoeplanError as error:
        return CaseScore(row, left_out=f"line {row.line}: {error.message}")


def _judge(row: PublishedRow) -> CaseScore:
    setting = setting_of(row)
    profile, stack = profile_of(setting.hardware), stack_of(setting.stack)
    try:
        plan = plan_of_case(row, setting, stack, profile)
    except InvalidInputError as error:
        return CaseScore(row, REFUSED, error.message.removeprefix("plan: "))
    problem = _refusal(plan, stack, setting.machine(profile, plan.num_gpus))
    if problem:
        return CaseScore(row, REFUSED, problem)
    if row.id.startswith("C"):
        alignment = PRECISIONS[plan.precision].alignment
        padded = f"rows of an expert are padded to {alignment}" if alignment > 1 and plan.model.moe else "legal"
        return CaseScore(row, FITS, padded)
    verdict, why = _memory_verdict(plan, setting, stack, profile)
    reported = float(row.text("reported_value")) if re.fullmatch(r"\d+(\.\d+)?", row.text("reported_value")) else None
    return CaseScore(row, verdict, why, reported=reported, predicted=_in_unit(row.text("unit"), plan, stack, profile))


def summarize_cases(scores: Sequence[CaseScore]) -> CaseSummary:
    """How many verdicts are right, by what was asked."""

    def count(which: Sequence[CaseScore]) -> tuple[int, int]:
        return sum(bool(one.is_right) for one in which), len(which)

    known = [one for one in scores if not one.left_out]
    memory = [one for one in known if not one.is_legality]
    return CaseSummary(
        *count([one for one in memory if one.outcome == OOM]),
        *count([one for one in memory if one.outcome == FITS]),
        *count([one for one in known if one.is_legality]),
        *count([one for one in memory if one.outcome == "throughput"]),
        left_out=len(scores) - len(known),
    )


def _refusal(plan: Plan, stack: SoftwareStack, profile: HardwareProfile) -> str:
    """The rule a legal plan breaks on its stack or machine, or empty."""
    for refusal in stack.refusals(plan.model, plan.point, profile):
        return refusal
    point = plan.point
    ranks = rank_elements(plan.model, point.layout, point.pp, tp=point.tp, etp=point.etp, ep=point.ep)
    shards = plan.folding.dp * plan.cp if plan.sharding == "full" else 1
    weights = max(map(sum, ranks)) * PRECISIONS[plan.precision].param_bytes / shards
    if weights > profile.memory_bytes.value:
        least = math.ceil(plan.num_gpus * weights / profile.memory_bytes.value)
        return (
            f"memory: weights alone take {format_bytes(weights)} a GPU of {format_bytes(profile.memory_bytes.value)}, "
            f"which needs {least} GPUs at least"
        )
    return ""


def _memory_verdict(
    plan: Plan, setting: CaseSetting, stack: SoftwareStack, profile: HardwareProfile
) -> tuple[str, str]:
    """Whether the plan fits, the margin of searches left free, and the largest categories of its worst rank."""
    categories = memory_by_rank(plan.model, plan.point, stack, profile)
    sums = [sum(column) for column in zip(*categories.values(), strict=True)]
    worst = sums.index(max(sums))
    peak, room = sums[worst], profile.memory_bytes.value * setting.memory_frac
    idle = stack.unmapped_reserve_frac
    if idle is not None and not setting.has_expandable_segments and plan.cuda_graph:
        peak *= 1 + idle.value
    largest = sorted(categories.items(), key=lambda item: -item[1][worst])[:3]
    parts = ", ".join(f"{name} {format_bytes(values[worst])}" for name, values in largest)
    text = f"{format_bytes(peak)} of {format_bytes(room)} ({100 * peak / room:.0f} %): {parts}"
    return (OOM if peak > room * (1 - MEMORY_MARGIN_FRAC) else FITS), text


def _in_unit(unit: str, plan: Plan, stack: SoftwareStack, profile: HardwareProfile) -> float | None:
    """The prediction in the unit of a case; None for units that are no figure of moeplan's."""
    for words, scale in (("GB allocated", GB), ("GiB allocated", GIB), ("GB GPU", GB)):
        if unit.startswith(words):
            return peak_of_reading(plan.model, plan.point, stack, profile, "allocated") / scale
    for words, scale in (("MB reserved", MB), ("GiB", GIB)):
        if unit.startswith(words):
            return peak_of_reading(plan.model, plan.point, stack, profile, "reserved") / scale
    if unit.startswith("% HBM"):
        peak = peak_of_reading(plan.model, plan.point, stack, profile, "device")
        return 100 * peak / profile.memory_bytes.value
    if not any(word in unit for word in ("TFLOPS/GPU", "/step", "tokens/s")):
        return None
    step_s = step_times(plan.model, [plan.point], stack, profile)[0].step_s
    rate = plan.tokens_per_step / step_s / plan.num_gpus
    if unit.endswith("/step"):
        return step_s * (1000 if unit.startswith("ms") else 1)
    return rate * training_flops_per_token(plan.model, plan.seq_len) / TFLOP if "TFLOPS" in unit else rate
