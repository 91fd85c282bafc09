"""Predicted beside measured, as ``moeplan run`` prints it."""

from rich.table import Table

from moeplan.report.output import out_console
from moeplan.report.tables import table
from moeplan.results import ComparedFigure, Comparison, Figures
from moeplan.units import format_bytes, format_seconds


def print_comparison(comparison: Comparison, measured: Figures) -> None:
    """The table, what memory means here, and the verdict."""
    console = out_console()
    title = f"Predicted and measured, plan {comparison.plan_id}"
    console.print(comparison_table(comparison, title, ("predicted", "measured", "error")))
    num_steps = len(measured.step_times_s)
    console.print(f"measured: median of {num_steps} steps, spread +- {100 * measured.error_bar_frac:.0f} %")
    for note in measured.notes:
        console.print(f"note: {note}")
    judged = [figure for figure in comparison.figures if figure.tolerance_frac is not None]
    for figure in judged:
        verdict = "within" if figure.within else "OUTSIDE"
        console.print(
            f"{figure.name}: {_error(figure)}, {verdict} the tolerance of {100 * (figure.tolerance_frac or 0):.0f} %"
        )


def comparison_table(comparison: Comparison, title: str, columns: tuple[str, str, str]) -> Table:
    """Every figure of both sides, with the relative difference."""
    rows = [
        [figure.name, _value(figure.predicted, figure.unit), _value(figure.measured, figure.unit), _error(figure)]
        for figure in comparison.figures
    ]
    return table(title, ["figure", *columns], rows)


def _value(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    return f"{value:.4g} {unit}"


def _error(figure: ComparedFigure) -> str:
    return "not measured" if figure.error_frac is None else f"{100 * figure.error_frac:+.1f} %"
