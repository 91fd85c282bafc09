"""What ``moeplan explain`` prints."""

from collections.abc import Sequence

from rich.table import Table

from moeplan.planner.explain import CriticalPhase, Variant
from moeplan.planner.request import MEMORY_MARGIN_FRAC
from moeplan.report.output import out_console
from moeplan.report.tables import table, with_text_last
from moeplan.results import Figures
from moeplan.units import format_bytes, format_seconds

# Differences below this part of the step are rounding, not a reason.
NOTABLE_FRAC = 0.002


def print_variants(title: str, base: Figures, variants: Sequence[Variant], usable_bytes: float) -> None:
    """Each variant beside the plan: step, memory, and what moved most; those that cannot be come last."""
    out_console().print(_table(title, base, variants, usable_bytes))


def _table(title: str, base: Figures, variants: Sequence[Variant], usable_bytes: float) -> Table:
    rows = [["the plan itself", format_seconds(base.step_s), "", format_bytes(base.peak_memory_bytes), "", ""]]
    for variant in sorted(variants, key=lambda one: one.predicted.step_s if one.predicted else float("inf")):
        if variant.predicted is None:
            rows.append([variant.change, "-", "-", "-", "-", f"not legal: {variant.problem}"])
            continue
        found = variant.predicted
        rows.append(
            [
                variant.change,
                format_seconds(found.step_s),
                f"{100 * (found.step_s / base.step_s - 1):+.1f} %",
                format_bytes(found.peak_memory_bytes),
                f"{100 * (found.peak_memory_bytes / base.peak_memory_bytes - 1):+.1f} %",
                _verdict(found.peak_memory_bytes / usable_bytes) + why(base, found),
            ]
        )
    return with_text_last(table(title, ["change", "step", "", "memory", "", "what moves the step"], rows))


def _verdict(used_frac: float) -> str:
    """What search would say of that much memory: beyond the device's, or in the margin that it leaves free."""
    if used_frac > 1:
        return "DOES NOT FIT; "
    return f"leaves {100 * (1 - used_frac):.1f} % free; " if used_frac > 1 - MEMORY_MARGIN_FRAC else ""


def why(base: Figures, found: Figures) -> str:
    """The families whose exposed time changes the step most, with their seconds."""
    families = {*base.time_s, *found.time_s}
    moved = {
        family: (found.time_s[family].exposed_s if family in found.time_s else 0.0)
        - (base.time_s[family].exposed_s if family in base.time_s else 0.0)
        for family in families
    }
    largest = sorted(moved.items(), key=lambda item: -abs(item[1]))[:3]
    parts = [
        f"{family} {'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"
        for family, seconds in largest
        if abs(seconds) > NOTABLE_FRAC * base.step_s
    ]
    return ", ".join(parts) or "nothing notable"


def print_critical(phases: Sequence[CriticalPhase]) -> None:
    """What lies on the critical path of each kind of layer, by stream and family: only that can shorten it."""
    rows = []
    for phase in phases:
        parts = [
            f"{family} {100 * seconds / phase.seconds:.0f} %" + ("" if stream == "compute" else f" ({stream})")
            for (stream, family), seconds in phase.by_family.items()
        ]
        waiting_s = phase.seconds - sum(run.cost.seconds for run in phase.path)
        if waiting_s > NOTABLE_FRAC * phase.seconds:
            parts.append(f"waiting for the host {100 * waiting_s / phase.seconds:.0f} %")
        rows.append([phase.part, phase.phase, format_seconds(phase.seconds), ", ".join(parts)])
    headers = ["layer", "phase", "seconds", "on the critical path, exchanges not overlapped"]
    out_console().print(with_text_last(table("Critical path of a layer, one micro-batch", headers, rows)))
