"""Errors of rows and groups, summaries, pairs."""

import math
from pathlib import Path

import pytest

from moeplan.planner.published_rows import PublishedRow, read_published_rows
from moeplan.planner.scoring import PairScore, RowScore, group_errors, percentile, score, score_pairs, summarize
from tests.planner.test_published_plan import BRIDGE, ROWS, SAMPLE


def scored(name: str, group: str, predicted: float | None) -> RowScore:
    row = PublishedRow(2, {"id": name, "group_key": group, "n_gpus": "8", "gbs": "16", "seq_len": "4096"})
    return RowScore(row, 1.0, predicted, rejected="" if predicted else "line 2: gpu: unknown")


def test_every_group_counts_once_and_a_rejected_one_is_infinite() -> None:
    errors = group_errors([scored("a", "x", 1.1), scored("b", "x", 1.3), scored("c", "x", 0.9), scored("d", "y", None)])
    assert errors["x"] == pytest.approx(0.1)
    assert errors["y"] == math.inf
    found = summarize([*errors.values(), -0.2])
    assert found.num_groups == 3
    assert found.coverage_frac == pytest.approx(2 / 3)
    assert found.median_frac == pytest.approx(0.2)
    assert found.p90_frac == math.inf
    assert found.bias_frac == pytest.approx(-0.05)


def test_percentile_lies_between_neighbours() -> None:
    assert percentile([0.0, 1.0, 2.0, 3.0], 0.5) == 1.5
    assert percentile([4.0], 0.9) == 4.0


def test_published_rows_are_predicted_within_a_quarter() -> None:
    rows, _ = read_published_rows(SAMPLE)
    scores = [score(row) for row in rows]
    assert not [one.rejected for one in scores if one.rejected]
    errors = [one.error_frac for one in scores if one.error_frac is not None]
    assert len(errors) == len(rows)
    assert max(map(abs, errors)) < 0.25
    assert summarize(errors).median_frac < 0.07
    memory = [one.memory_error_frac for one in scores if one.memory_error_frac is not None]
    assert memory
    assert max(map(abs, memory)) < 0.05


def test_a_bad_row_is_rejected_with_line_column_and_reason() -> None:
    bad = PublishedRow(7, ROWS[BRIDGE].cells | {"gpu": "MI300X"})
    assert score(bad).rejected.startswith("line 7: gpu: no hardware profile of 'MI300X'")
    assert score(bad).error_frac is None


def test_pairs_compare_gpu_seconds_per_token() -> None:
    halves = [scored("a", "x", 2.0), scored("b", "y", 1.0), scored("c", "z", None)]

    def pair(second: str, ratio: str) -> PublishedRow:
        return PublishedRow(3, {"axis": "gbs", "id_a": "a", "id_b": second, "step_ratio": ratio})

    right, wrong, none, unknown = score_pairs(
        [pair("b", "0.4"), pair("b", "1.2"), pair("c", "0.5"), pair("q", "0.5")], halves
    )
    assert right.is_right
    assert right.error_frac == pytest.approx(0.25)
    assert wrong.is_right is False
    assert "unknown" in none.rejected
    assert "no row 'q'" in unknown.rejected


def test_rows_of_the_report_are_within_a_tenth() -> None:
    """Report section 9.1, also ``moeplan validate tests/data/report_rows.csv``."""
    rows, bad = read_published_rows(Path(__file__).parents[1] / "data" / "report_rows.csv")
    assert not bad
    errors = {row.id: score(row).error_frac for row in rows}
    assert len(errors) == 9
    assert {name: error for name, error in errors.items() if error is None or abs(error) >= 0.10} == {}


def test_sizes_that_neither_half_of_a_pair_states_are_assumed() -> None:
    cells = {"tp": "2", "pp": "2", "ep": "4", "etp": "1", "n_gpus": "", "gbs": "", "mbs": ""}
    row = PublishedRow(2, cells).with_assumed_sizes()
    assert (row.count("n_gpus"), row.count("gbs")) == (8, 32)
    assert PublishedRow(2, cells | {"n_gpus": "16"}).with_assumed_sizes().count("gbs") == 64
    assert PublishedRow(2, cells | {"n_gpus": "16", "gbs": "7"}).with_assumed_sizes().text("gbs") == "7"


def test_a_tie_names_neither_half_of_a_pair() -> None:
    assert PairScore("a", "x", "y", 0.9, 1.0).is_right is False
    assert PairScore("a", "x", "y", 1.1, 1.0).is_right is False
    assert PairScore("a", "x", "y", 1.1, 1.01).is_right is True
