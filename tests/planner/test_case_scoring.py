"""Reported cases: each verdict, the figures of public readings, and that no cell stops the rest."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.planner.case_scoring import CASE_COLUMNS, CaseScore, score_case, summarize_cases
from moeplan.planner.published_rows import PublishedRow, read_table

CASES = Path(__file__).parents[1] / "data" / "reported_cases.csv"
ROWS, _ = read_table(CASES, CASE_COLUMNS)
SCORES = {row.id: score_case(row) for row in ROWS}
COLUMNS = tuple(ROWS[0].cells)


@pytest.mark.parametrize("name", [name for name, one in SCORES.items() if not one.left_out])
def test_verdict_is_the_reported_one(name: str) -> None:
    assert SCORES[name].is_right, SCORES[name].why


@pytest.mark.parametrize(
    "name, rule",
    [
        ("C04.1", "has 64 decoder layers"),
        ("C08.2", "ep 48 does not divide the 128 experts"),
        ("C09.1", "refuses ep 2 below tp 4"),
        ("C11.2", "needs 8 GPUs in an NVLink domain"),
        ("C11.3", "DeepEP has kernels for ep x etp of 2, 4, 8"),
        ("C12.1", "at most 8144 across nodes, got 8192"),
        ("C14.1", "deepep with ep 16 on b300"),
        ("C15.1", "ep_overlap: excludes recompute of moe"),
        ("C15.2", "ep_overlap: needs virtual stages"),
        ("C17.1", "sequence_parallel: MoE layers under tp 2 need it"),
        ("C18.2", "4100 is not a multiple of 2 x cp 4"),
        ("C20.1", "expert width 768 over etp 4 is 192"),
        ("C22.1", "weights alone take 1256.2 GiB a GPU"),
        ("C23.1", "has 90 decoder layers"),
    ],
)
def test_refusal_names_the_rule(name: str, rule: str) -> None:
    assert SCORES[name].verdict == "rejected"
    assert rule in SCORES[name].why


@pytest.mark.parametrize(
    "name, error_frac",
    [
        ("A11.1", 0.05),  # Moonlight, 36.6 GB allocated
        ("A11.5", 0.05),
        ("A13.5", 0.12),  # optimizer step wholly on the host
        ("A14.1", 0.03),  # EP overlap over the all-to-all
        ("B10.4", 0.03),  # and over HybridEP
        ("B18-v3.4", 0.01),
        ("A34.1", 0.03),  # fully sharded state: 8, 32 and 128 GPUs
        ("A34.3", 0.03),
        ("A34.6", 0.03),
        ("A04.6", 0.06),
    ],
)
def test_memory_figures_of_public_readings(name: str, error_frac: float) -> None:
    found = SCORES[name].error_frac
    assert found is not None
    assert abs(found) < error_frac


def test_what_cannot_be_expressed_names_column_and_line() -> None:
    row = PublishedRow(7, next(one for one in ROWS if one.id == "A09.2").cells | {"model": "Nemotron-9"})
    left_out = score_case(row)
    assert re.match(r"line \d+: model: unknown model 'nemotron-9", left_out.left_out)
    assert left_out.is_right is None


def test_balanced_accuracy_is_the_mean_of_both_shares() -> None:
    def case(outcome: str, verdict: str) -> CaseScore:
        return CaseScore(PublishedRow(2, {"id": "A1", "outcome": outcome}), verdict)

    scores = [case("oom", "oom"), case("oom", "fits"), case("fits", "fits"), case("throughput", "oom")]
    found = summarize_cases([*scores, CaseScore(PublishedRow(3, {"id": "A2"}), left_out="why")])
    assert (found.oom_right, found.oom, found.fits_right, found.fits) == (1, 2, 1, 1)
    assert found.balanced_accuracy_frac == 0.75
    assert (found.timed_right, found.timed, found.left_out) == (0, 1, 1)


@settings(max_examples=60, deadline=None)
@given(
    row=st.sampled_from(ROWS),
    column=st.sampled_from(COLUMNS),
    text=st.one_of(st.text(max_size=8), st.sampled_from(["", "0", "-1", "1e12", "nan", "7", "1000000"])),
)
def test_no_cell_stops_the_rest(row: PublishedRow, column: str, text: str) -> None:
    found = score_case(PublishedRow(row.line, row.cells | {column: text}))
    assert bool(found.left_out) != bool(found.verdict)
