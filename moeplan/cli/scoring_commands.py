"""Signatures of the commands that judge predictions: check, validate, fit.

Bodies import what they need, so that ``--help`` stays fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from moeplan.cli.options import Json


def check(  # noqa: PLR0917 - typer: one parameter per option
    lock: Annotated[Path, typer.Argument(help="Lock JSON, as written by predict --lock.")],
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", min=0, help="Allowed relative change of every judged figure.")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Record the present predictions, judge nothing.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Also write a Markdown table.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Also write JUnit XML.")] = None,
    as_json: Json = False,
) -> None:
    """Recompute the predictions of a lock; exit 4 where one has moved beyond its tolerance."""
    from moeplan.cli.check import CheckOptions, run_check

    run_check(lock, CheckOptions(tolerance, update, markdown, junit, as_json))


def validate(  # noqa: PLR0917 - typer: one parameter per option
    runs: Annotated[Path | None, typer.Argument(help="CSV of measured runs, with the columns docs name.")] = None,
    cases: Annotated[
        Path | None, typer.Option("--cases", help="Instead, CSV of reported cases: oom, fits, rejected, throughput.")
    ] = None,
    pairs: Annotated[Path | None, typer.Option("--pairs", help="CSV of A/B pairs of those runs.")] = None,
    eval_set: Annotated[str, typer.Option("--eval-set", help="Only rows of these evaluation sets: moe,dense.")] = "",
    keep: Annotated[str, typer.Option("--filter", help="Only rows with these cells: gpu=H100,model=deepseek-v3.")] = "",
    as_json: Json = False,
) -> None:
    """Predict every row of a table of measured runs and score the errors; bad rows are listed, never fatal."""
    from moeplan.cli.validate import ValidateOptions, run_validate
    from moeplan.cli.validate_cases import run_validate_cases

    if (runs is None) == (cases is None):
        raise typer.BadParameter("give a CSV of measured runs, or --cases with one of reported cases")
    if cases is not None:
        run_validate_cases(cases, as_json)
    elif runs is not None:
        run_validate(ValidateOptions(runs, pairs, eval_set, keep, as_json))


def fit(
    runs: Annotated[Path, typer.Argument(help="CSV of measured runs, as validate takes it.")],
    eval_set: Annotated[str, typer.Option("--eval-set", help="Evaluation sets to fit to.")] = "moe,dense,moe_hybrid",
    keep: Annotated[str, typer.Option("--filter", help="Only rows with these cells: gpu=H100.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for fitted profiles and stacks.")] = None,
    as_json: Json = False,
) -> None:
    """Fit the declared constants to measured runs; errors are of runs the values have not seen."""
    from moeplan.cli.fit import FitOptions, run_fit

    run_fit(FitOptions(runs, eval_set, keep, out, as_json))
