"""What ``moeplan compare`` prints."""

from collections.abc import Mapping
from typing import Any

from moeplan.report.comparison import comparison_table
from moeplan.report.output import out_console
from moeplan.report.tables import table
from moeplan.results import Comparison
from moeplan.units import format_bytes, format_seconds

NUM_MOVERS = 3


def print_side_by_side(before: str, after: str, changes: Mapping[str, tuple[Any, Any]], comparison: Comparison) -> None:
    """Changed plan fields, every figure, and the families and categories that moved most."""
    console = out_console()
    console.print(f"A: {before}\nB: {after}")
    if changes:
        rows = [[key, str(one), str(other)] for key, (one, other) in changes.items()]
        console.print(table("What differs in the plan", ["field", "A", "B"], rows, left=3))
    console.print(comparison_table(comparison, "Figures", ("B", "A", "B over A")))
    for prefix, what, render in (("time.", "time", format_seconds), ("memory.", "memory", format_bytes)):
        movers = sorted(
            (figure for figure in comparison.figures if figure.name.startswith(prefix)),
            key=lambda figure: -abs(figure.predicted - figure.measured),
        )
        moved = [
            f"{figure.name.removeprefix(prefix)} {'+' if figure.predicted > figure.measured else '-'}"
            f"{render(abs(figure.predicted - figure.measured))}"
            for figure in movers[:NUM_MOVERS]
            if figure.predicted != figure.measured
        ]
        console.print(f"{what} moved most: {', '.join(moved) or 'nothing'}")
