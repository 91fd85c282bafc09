"""What ``moeplan check`` prints: a table, Markdown for a pull request, JUnit for a CI server."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from moeplan.lock import LockEntry
from moeplan.report.output import out_console
from moeplan.report.tables import table
from moeplan.results import ComparedFigure, Comparison


@dataclass(frozen=True, slots=True)
class CheckedEntry:
    """A lock entry recomputed. ``comparison`` has the new figure as predicted, the recorded one as measured."""

    entry: LockEntry
    comparison: Comparison

    @property
    def title(self) -> str:
        plan = self.entry.plan
        return f"{plan.model.name} on {plan.num_gpus} x {plan.hardware} ({plan.plan_id}, {self.entry.recorded.kind})"

    @property
    def failures(self) -> list[ComparedFigure]:
        return [figure for figure in self.comparison.figures if not figure.within]


def _row(checked: CheckedEntry, figure: ComparedFigure) -> list[str]:
    error = "-" if figure.error_frac is None else f"{100 * figure.error_frac:+.2f} %"
    tolerance = "" if figure.tolerance_frac is None else f"{100 * figure.tolerance_frac:g} %"
    verdict = "" if figure.tolerance_frac is None else ("ok" if figure.within else "FAIL")
    return [
        checked.title,
        figure.name,
        f"{figure.measured:.6g}",
        f"{figure.predicted:.6g}",
        error,
        tolerance,
        verdict,
    ]


COLUMNS = ("plan", "figure", "recorded", "now", "change", "tolerance", "verdict")


def _rows(checked: Sequence[CheckedEntry]) -> list[list[str]]:
    """Judged figures always; the others only where they moved, since they say why."""
    return [
        _row(one, figure)
        for one in checked
        for figure in one.comparison.figures
        if figure.tolerance_frac is not None or abs(figure.error_frac or 0) > 1e-3
    ]


def print_check(checked: Sequence[CheckedEntry]) -> None:
    """A table on stdout."""
    out_console().print(table("Recorded and now", COLUMNS, _rows(checked), left=2))


def markdown(checked: Sequence[CheckedEntry]) -> str:
    """A Markdown table of the same rows."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row)} |" for row in _rows(checked)]
    return "\n".join(lines) + "\n"


def junit(checked: Sequence[CheckedEntry]) -> str:
    """JUnit XML: one test case a judged figure."""
    cases = [(one, figure) for one in checked for figure in one.comparison.figures if figure.tolerance_frac is not None]
    num_failures = sum(not figure.within for _, figure in cases)
    suite = ET.Element("testsuite", name="moeplan check", tests=str(len(cases)), failures=str(num_failures), errors="0")
    for one, figure in cases:
        case = ET.SubElement(suite, "testcase", classname=one.title, name=figure.name)
        if not figure.within:
            message = f"recorded {figure.measured:.6g} {figure.unit}, now {figure.predicted:.6g} {figure.unit}"
            ET.SubElement(case, "failure", message=message)
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
