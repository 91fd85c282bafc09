"""What ``moeplan validate --cases`` prints."""

from collections.abc import Sequence
from typing import Any

from moeplan.planner.case_scoring import CaseScore, summarize_cases
from moeplan.report.output import out_console
from moeplan.report.tables import table, with_text_last
from moeplan.report.validate import percent


def print_cases(scores: Sequence[CaseScore], bad_lines: Sequence[tuple[int, str]]) -> None:
    """The summary, wrong verdicts with why, figures beside reported ones, all verdicts, and what was left out."""
    console = out_console()
    known = [one for one in scores if not one.left_out]
    rows = [_verdict_cells(one) for one in known]
    console.print(with_text_last(table("Verdicts", ["case", "reported", "moeplan", "right", "why"], rows, left=4)))
    figures = [one for one in known if one.error_frac is not None]
    if figures:
        cells = [
            [one.row.id, f"{one.reported:g}", f"{one.predicted:.4g}", percent(one.error_frac, signed=True), _unit(one)]
            for one in figures
        ]
        console.print(with_text_last(table("Figures", ["case", "reported", "predicted", "error", "unit"], cells)))
    left_out = [[one.row.id, one.left_out] for one in scores if one.left_out]
    left_out += [["-", f"line {line}: {reason}"] for line, reason in bad_lines]
    if left_out:
        console.print(with_text_last(table("Cases that cannot be expressed", ["case", "reason"], left_out)))
    wrong = [_verdict_cells(one) for one in known if not one.is_right]
    if wrong:
        console.print(
            with_text_last(table("Wrong verdicts", ["case", "reported", "moeplan", "right", "why"], wrong, left=4))
        )
    console.print(_summary(scores))


def cases_json(scores: Sequence[CaseScore], bad_lines: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """The same as JSON: ``cases`` and ``summary``."""
    found = summarize_cases(scores)
    return {
        "cases": [_case_json(one) for one in scores],
        "bad_lines": [{"line": line, "reason": reason} for line, reason in bad_lines],
        "summary": {
            "oom": {"right": found.oom_right, "n": found.oom},
            "fits": {"right": found.fits_right, "n": found.fits},
            "balanced_accuracy": found.balanced_accuracy_frac if found.oom and found.fits else None,
            "legality": {"right": found.legality_right, "n": found.legality},
            "timed_runs_that_fit": {"right": found.timed_right, "n": found.timed},
            "left_out": found.left_out,
        },
    }


def _summary(scores: Sequence[CaseScore]) -> Any:
    found = summarize_cases(scores)
    lines = [
        ["ran out of memory", str(found.oom), str(found.oom_right)],
        ["fit", str(found.fits), str(found.fits_right)],
        ["legal or not", str(found.legality), str(found.legality_right)],
        ["timed, so fit", str(found.timed), str(found.timed_right)],
        ["cannot be expressed", str(found.left_out), "-"],
        ["balanced accuracy of memory", "", percent(found.balanced_accuracy_frac)],
    ]
    return table("Cases", ["reported", "cases", "right"], lines)


def _verdict_cells(one: CaseScore) -> list[str]:
    return [one.row.id, one.outcome, one.verdict, "yes" if one.is_right else "no", one.why]


def _unit(one: CaseScore) -> str:
    return one.row.text("unit")


def _case_json(one: CaseScore) -> dict[str, Any]:
    if one.left_out:
        return {"id": one.row.id, "outcome": one.outcome, "left_out": one.left_out}
    return {
        "id": one.row.id,
        "outcome": one.outcome,
        "verdict": one.verdict,
        "right": one.is_right,
        "why": one.why,
        "reported": one.reported,
        "predicted": one.predicted,
        "unit": _unit(one),
        "error_frac": one.error_frac,
    }
