"""``moeplan validate``."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from moeplan.errors import InvalidInputError
from moeplan.planner.published_rows import CellError, PublishedRow, read_published_rows, read_table
from moeplan.planner.scoring import (
    PairScore,
    RowScore,
    Summary,
    group_errors,
    score,
    score_pairs,
    summaries_by,
    summarize,
)
from moeplan.report.output import err_console, print_json
from moeplan.report.validate import print_validation

BREAKDOWNS = {"gpu": "gpu", "precision": "precision", "stack": "stack", "model": "model"}
PAIR_COLUMNS = ("axis", "id_a", "id_b", "step_ratio")


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """Options of the command, as typed."""

    runs: Path
    pairs: Path | None
    eval_set: str
    keep: str
    as_json: bool


@dataclass(frozen=True, slots=True)
class Validation:
    """Scores of the rows asked for, of lines that are no rows, and of pairs."""

    scores: list[RowScore]
    bad_lines: list[tuple[int, str]]
    pairs: list[PairScore]

    @property
    def summary(self) -> Summary:
        return summarize(list(group_errors(self.scores).values()))

    def breakdowns(self) -> dict[str, dict[str, Summary]]:
        """Summaries by GPU, precision, stack and model."""
        return {name: _by(self.scores, column) for name, column in BREAKDOWNS.items()}

    def memory_errors(self) -> list[float]:
        """Errors of peak memory, one a row whose reading is usable."""
        return [one.memory_error_frac for one in self.scores if one.memory_error_frac is not None]


def _by(scores: list[RowScore], column: str) -> dict[str, Summary]:
    return summaries_by(scores, lambda row: row.text(column))


def run_validate(options: ValidateOptions) -> None:
    """Predict every row asked for, print one error a row and the summary. Bad rows are listed and never stop it."""
    rows, bad_lines = read_published_rows(options.runs)
    wanted = select_rows(rows, options.eval_set, options.keep)
    pairs: list[PublishedRow] = []
    if options.pairs is not None:
        pairs, bad_pairs = read_table(options.pairs, PAIR_COLUMNS)
        bad_lines += bad_pairs
    halves = {row.text(column) for row in pairs for column in ("id_a", "id_b")}
    known = {row.id for row in wanted}
    others = [row for row in rows if row.id in halves and not (row.id in known and _states_sizes(row))]
    scores = _score_all([*wanted, *map(_comparable, others)])
    result = Validation(scores[: len(wanted)], bad_lines, score_pairs(pairs, scores))
    if options.as_json:
        print_json(validation_json(result))
    else:
        print_validation(result)


def _states_sizes(row: PublishedRow) -> bool:
    return bool(row.text("n_gpus") and row.text("gbs"))


def _comparable(row: PublishedRow) -> PublishedRow:
    """Half of a pair: a size that neither half states is assumed, because it nearly cancels in their ratio."""
    if _states_sizes(row):
        return row
    try:
        return row.with_assumed_sizes()
    except CellError:
        return row  # scoring says what is wrong with it


def select_rows(rows: list[PublishedRow], eval_set: str, keep: str) -> list[PublishedRow]:
    """Rows of evaluation sets (a comma between them; empty: all) whose cells match ``column=value,...``.

    Equal columns are alternatives.

    Raises InvalidInputError for a column that the table lacks, and where no row is left.
    """
    wanted: dict[str, set[str]] = {"eval_set": {name.strip() for name in eval_set.split(",")}} if eval_set else {}
    for item in filter(None, (part.strip() for part in keep.split(","))):
        column, separator, value = (part.strip() for part in item.partition("="))
        if not separator or (rows and column not in rows[0].cells):
            raise InvalidInputError(f"--filter: got {item!r}, allowed: column=value", "name a column of the table")
        wanted.setdefault(column, set()).add(value)
    kept = [row for row in rows if all(row.text(column) in values for column, values in wanted.items())]
    if not kept:
        asked = " and ".join(f"{column} {' or '.join(sorted(values))}" for column, values in wanted.items())
        raise InvalidInputError(f"no row with {asked or 'any value'}", "loosen --filter or --eval-set")
    return kept


def _score_all(rows: list[PublishedRow]) -> list[RowScore]:
    with Progress(console=err_console(), transient=True) as progress:
        return [score(row) for row in progress.track(rows, description="predicting")]


def validation_json(result: Validation) -> dict[str, Any]:
    """The JSON that callers may rely on: rows, lines that are none, summary, pairs."""
    right = [one.is_right for one in result.pairs if one.is_right is not None]
    ratios = [abs(one.error_frac) for one in result.pairs if one.error_frac is not None]
    return {
        "rows": [_row_json(one) for one in result.scores],
        "bad_lines": [{"line": line, "reason": reason} for line, reason in result.bad_lines],
        "summary": {
            **_summary_json(result.summary),
            **{
                f"by_{name}": {value: _summary_json(one) for value, one in parts.items()}
                for name, parts in result.breakdowns().items()
            },
            "memory": _summary_json(summarize(result.memory_errors())),
        },
        "pairs": [_pair_json(one) for one in result.pairs],
        "pairs_summary": {
            "n": len(result.pairs),
            "predicted": len(right),
            "sign_right_frac": sum(right) / len(right) if right else None,
            "sign_right_of_all_frac": sum(right) / len(result.pairs) if result.pairs else None,
            "median_ratio_error_frac": _finite(sorted(ratios)[len(ratios) // 2]) if ratios else None,
        },
    }


def _row_json(one: RowScore) -> dict[str, Any]:
    if one.rejected:
        return {"id": one.row.id, "rejected": one.rejected}
    return {
        "id": one.row.id,
        "predicted_step_s": one.predicted_step_s,
        "published_step_s": one.published_step_s,
        "error_frac": one.error_frac,
        "predicted_peak_memory_bytes": one.predicted_peak_memory_bytes,
        "memory_error_frac": one.memory_error_frac,
    }


def _summary_json(one: Summary) -> dict[str, Any]:
    return {
        "n": one.num_groups,
        "coverage": one.coverage_frac,
        "median": _finite(one.median_frac),
        "p90": _finite(one.p90_frac),
        "bias": _finite(one.bias_frac),
    }


def _pair_json(one: PairScore) -> dict[str, Any]:
    shared = {"axis": one.axis, "id_a": one.id_a, "id_b": one.id_b}
    if one.rejected:
        return {**shared, "rejected": one.rejected}
    return {
        **shared,
        "published_ratio": one.published_ratio,
        "predicted_ratio": one.predicted_ratio,
        "sign_right": one.is_right,
        "error_frac": one.error_frac,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
