"""What ``moeplan validate`` and ``moeplan fit`` print."""

import math
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

from moeplan.planner.scoring import PairScore, RowScore, Summary, summarize
from moeplan.report.output import out_console
from moeplan.report.tables import table, with_text_last
from moeplan.units import format_seconds

if TYPE_CHECKING:
    from moeplan.cli.validate import Validation

SUMMARY_COLUMNS = ("groups", "predicted", "median", "90 % below", "bias")


def print_validation(result: "Validation") -> None:
    """One line a row, the summary of groups, memory, pairs, and what was rejected."""
    console = out_console()
    predicted = [one for one in result.scores if not one.rejected]
    if predicted:
        console.print(_rows(predicted))
    rejected = [[one.row.id, one.rejected] for one in result.scores if one.rejected]
    rejected += [["-", f"line {line}: {reason}"] for line, reason in result.bad_lines]
    if rejected:
        console.print(with_text_last(table("Rejected rows", ["row", "reason"], rejected)))
    lines = [("all", "", result.summary)]
    lines += [(name, value, one) for name, parts in result.breakdowns().items() for value, one in parts.items()]
    console.print(summary_table("Error of the step time, one value a group of rows", lines))
    memory = result.memory_errors()
    if memory:
        console.print(
            summary_table("Error of peak memory, rows whose reading is usable", [("all", "", summarize(memory))])
        )
    if result.pairs:
        console.print(_pairs(result.pairs))


def summary_table(title: str, lines: list[tuple[str, str, Summary]]) -> Table:
    """Summaries, one a line: by what, value, and the figures."""
    rows = [[by, value, *summary_cells(one)] for by, value, one in lines]
    return table(title, ["by", "value", *SUMMARY_COLUMNS], rows, left=2)


def summary_cells(one: Summary) -> list[str]:
    """Figures of one summary as text."""
    return [
        str(one.num_groups),
        f"{100 * one.coverage_frac:.0f} %",
        percent(one.median_frac),
        percent(one.p90_frac),
        percent(one.bias_frac, signed=True),
    ]


def percent(value: float | None, *, signed: bool = False) -> str:
    """A fraction in per cent; a dash where there is none."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "infinite"
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def _rows(scores: list[RowScore]) -> Table:
    rows = [
        [
            one.row.id,
            format_seconds(one.published_step_s or 0.0),
            format_seconds(one.predicted_step_s or 0.0),
            percent(one.error_frac, signed=True),
            percent(one.memory_error_frac, signed=True),
        ]
        for one in scores
    ]
    return table("Measured and predicted step times", ["row", "measured", "predicted", "error", "memory"], rows)


def _pairs(pairs: list[PairScore]) -> Table:
    by_axis: dict[str, list[PairScore]] = defaultdict(list)
    for pair in pairs:
        by_axis[pair.axis].append(pair)
        by_axis["all"].append(pair)
    rows = []
    for axis, found in sorted(by_axis.items(), key=lambda item: -len(item[1])):
        known = [one for one in found if one.is_right is not None]
        sizes = [abs(one.error_frac) for one in known if one.error_frac is not None]
        right = f"{100 * sum(bool(one.is_right) for one in known) / len(known):.0f} %" if known else "-"
        rows.append([axis, str(len(found)), str(len(known)), right, percent(median(sizes)) if sizes else "-"])
    return table("Pairs of runs", ["axis", "pairs", "predicted", "sign right", "median error of ratio"], rows)
