"""``moeplan fit``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from moeplan.cli.validate import select_rows
from moeplan.errors import InvalidInputError, MoeplanError
from moeplan.files import write_text_atomically
from moeplan.hwprofiles.load import load_profile
from moeplan.planner.fit import REF, FitResult, fit
from moeplan.planner.fit_constants import FIT_CONSTANTS
from moeplan.planner.published_rows import CellError, PublishedRow, read_published_rows
from moeplan.planner.scoring import Case, case_of, summarize
from moeplan.report.output import err_console, out_console, print_json
from moeplan.report.tables import table
from moeplan.report.validate import summary_table
from moeplan.simulator.stack import load_stack


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Options of the command, as typed."""

    runs: Path
    eval_set: str
    keep: str
    out: Path | None
    as_json: bool


def run_fit(options: FitOptions) -> None:
    """Fit the declared constants, print them with cross-validated errors, write profiles and stacks that hold them."""
    rows, _ = read_published_rows(options.runs)
    cases = _cases(select_rows(rows, options.eval_set, options.keep))
    if len({case.row.group for case in cases}) < 10:
        raise InvalidInputError(
            f"only {len(cases)} rows can be predicted, too few to fit {len(FIT_CONSTANTS)} constants",
            "give a table with at least 10 groups of rows that moeplan validate predicts",
        )
    profiles = {name: load_profile(name) for name in sorted({case.plan.hardware for case in cases})}
    stacks = {name: load_stack(name) for name in sorted({case.plan.stack for case in cases})}
    console = err_console()
    constants = tuple(one for one in FIT_CONSTANTS if any(map(one.owns, (*profiles, *stacks))))
    result = fit(constants, cases, profiles, stacks, progress=console.print)
    if options.out is not None:
        write_fitted(result, options.out, set(profiles), set(stacks))
    if options.as_json:
        print_json(fit_json(result))
    else:
        _print(result)


def _cases(rows: list[PublishedRow]) -> list[Case]:
    found = []
    for row in rows:
        try:
            found.append(case_of(row))
        except (CellError, MoeplanError):
            continue  # moeplan validate lists it with the reason
    return found


def write_fitted(result: FitResult, folder: Path, profiles: set[str], stacks: set[str]) -> None:
    """``hardware/NAME.toml`` and ``stacks/NAME.toml``: each inherits its preset and holds the fitted values."""
    error = summarize(list(result.held_out_errors.values())).median_frac
    ref = f"{REF}: {len(result.group_errors)} groups, cross-validated median error {100 * error:.1f} %"
    for owner, names in (("profile", profiles), ("stack", stacks)):
        for name in sorted(names):
            entries = {
                constant.field: {"value": float(f"{value:.4g}"), "source": "fitted", "ref": ref}
                for constant, value in zip(result.constants, result.values, strict=True)
                if constant.owner == owner and constant.owns(name)
            }
            made: dict[str, Any] = {"base": name, "name": f"{name}-fitted"}
            made |= entries if owner == "profile" else {"time": entries}
            kind = "hardware" if owner == "profile" else "stacks"
            write_text_atomically(folder / kind / f"{name}-fitted.toml", tomli_w.dumps(made))


def fit_json(result: FitResult) -> dict[str, Any]:
    """Constants with start, value, range and meaning; errors of groups seen, held out, and without their model."""
    return {
        "constants": [
            {
                "name": constant.label,
                "meaning": constant.meaning,
                "unit": constant.unit,
                "low": constant.low,
                "high": constant.high,
                "start": start,
                "value": value,
            }
            for constant, start, value in zip(result.constants, result.start, result.values, strict=True)
        ],
        "group_error_frac": result.group_errors,
        "held_out_error_frac": result.held_out_errors,
        "without_model_error_frac": result.without_model_errors,
    }


def _print(result: FitResult) -> None:
    rows = [
        [one.label, one.unit, f"{one.low:g} to {one.high:g}", f"{start:.4g}", f"{value:.4g}", one.meaning]
        for one, start, value in zip(result.constants, result.start, result.values, strict=True)
    ]
    made = table("Fitted constants", ["constant", "unit", "range", "before", "fitted", "meaning"], rows)
    made.columns[-1].justify, made.columns[-1].no_wrap = "left", False
    console = out_console()
    console.print(made)
    lines = [
        ("fitted", "all groups", summarize(list(result.group_errors.values()))),
        ("cross-validated", "without each (model, GPU)", summarize(list(result.held_out_errors.values()))),
        ("cross-validated", "without each model", summarize(list(result.without_model_errors.values()))),
    ]
    console.print(summary_table("Error of the step time, one value a group of rows", lines))
