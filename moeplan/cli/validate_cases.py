"""``moeplan validate --cases``."""

from pathlib import Path

from rich.progress import Progress

from moeplan.planner.case_scoring import CASE_COLUMNS, score_case
from moeplan.planner.published_rows import read_table
from moeplan.report.cases import cases_json, print_cases
from moeplan.report.output import err_console, print_json


def run_validate_cases(path: Path, as_json: bool) -> None:
    """Give a verdict on every case of a table; what cannot be expressed is listed and never stops it."""
    rows, bad_lines = read_table(path, CASE_COLUMNS)
    with Progress(console=err_console(), transient=True) as progress:
        scores = [score_case(row) for row in progress.track(rows, description="judging")]
    if as_json:
        print_json(cases_json(scores, bad_lines))
    else:
        print_cases(scores, bad_lines)
