"""Tables of measured runs: damage stays in its line, and no cell whatever stops the rows beside it."""

import math
from pathlib import Path

import pytest

from moeplan.errors import InvalidInputError
from moeplan.planner.case_scoring import CASE_COLUMNS, score_case
from moeplan.planner.published_rows import REQUIRED_COLUMNS, PublishedRow, read_published_rows, read_table
from moeplan.planner.scoring import score, score_pairs

DATA = Path(__file__).parents[1] / "data"
HEADER = ",".join(REQUIRED_COLUMNS)
GOOD = ",".join("x" for _ in REQUIRED_COLUMNS)
DAMAGE = (
    *("0", "-1", "1.5", "nan", "inf", "1e300", "1e18", "1000000007", "x", "\x00", "²", "none", "full"),
    *("a" * 5000, "selective:", "opt_cpu:", "opt_cpu:nan", "act_layers:-1", "act_fine:", "te:", "E(t)*99999999999L"),
)


def _read(folder: Path, content: bytes) -> tuple[list[int], list[int]]:
    """Lines of the rows of a table, and those that are none."""
    path = folder / "runs.csv"
    path.write_bytes(content)
    rows, bad = read_published_rows(path)
    return [row.line for row in rows], [line for line, _ in bad]


@pytest.mark.parametrize(
    "damaged, bad",
    [
        ("short,line", [3]),
        (GOOD + ",one more", [3]),
        ('"never closed' + GOOD, [3]),
        (GOOD.removesuffix("x") + '"never closed', [3]),
        ("x," * 7 + "x" * 200_000, [3]),  # beyond what csv takes for one cell
        ('"x\ny"' + GOOD[1:], []),  # a line break that is quoted is none
        ("", []),
        ("\ufffd" + GOOD, []),
    ],
)
def test_damage_stays_in_its_line(tmp_path: Path, damaged: str, bad: list[int]) -> None:
    rows, found = _read(tmp_path, f"{HEADER}\n{GOOD}\n{damaged}\n{GOOD}\n{GOOD}".encode())
    assert found == bad
    after = 4 + damaged.count("\n")
    assert [line for line in rows if line != 3] == [2, after, after + 1]


def test_what_is_no_utf8_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    assert _read(tmp_path, b"\xef\xbb\xbf" + f"{HEADER}\r\n{GOOD}\r\n".encode() + b"caf\xe9" + GOOD.encode()) == (
        [2, 3],
        [],
    )


@pytest.mark.parametrize("content", [b"", b"\n", b"a,b\n1,2\n", HEADER.encode() + b",id\n", b'"' + HEADER.encode()])
def test_what_is_no_table_is_one_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"runs\.csv: "):
        _read(tmp_path, content)


@pytest.mark.parametrize("column", read_published_rows(DATA / "published_runs_sample.csv")[0][0].cells)
def test_no_cell_of_a_run_stops_the_rest(column: str) -> None:
    row = read_published_rows(DATA / "published_runs_sample.csv")[0][0]
    assert not score(row).rejected
    for damage in DAMAGE:
        found = score(PublishedRow(row.line, row.cells | {column: damage}))
        assert len(found.rejected) < 1000
        if not found.rejected:
            assert found.predicted_step_s is not None
            assert 0 < found.predicted_step_s < math.inf


@pytest.mark.parametrize(
    "column, damage",
    [("mtp_layers", "-1"), ("mtp_layers", "1.5"), ("layers", "1e18"), ("memory_gb", "0"), ("memory_gb", "-3")],
)
def test_impossible_sizes_name_their_column(column: str, damage: str) -> None:
    row = read_published_rows(DATA / "published_runs_sample.csv")[0][0]
    rejected = score(PublishedRow(row.line, row.cells | {column: damage, "memory_usable": "1"})).rejected
    assert rejected.startswith(f"line 2: {'model' if column == 'layers' else column}: ")


def test_a_dispatcher_may_be_stated_to_have_no_sms_of_its_own() -> None:
    row = read_published_rows(DATA / "published_runs_sample.csv")[0][0]
    assert not score(PublishedRow(row.line, row.cells | {"dispatch_sms": "0"})).rejected


def test_no_cell_of_a_pair_stops_the_rest() -> None:
    rows, _ = read_published_rows(DATA / "published_runs_sample.csv")
    scores = [score(row) for row in rows[:2]]
    good = {"axis": "precision", "id_a": rows[0].id, "id_b": rows[1].id, "step_ratio": "1.2"}
    assert score_pairs([PublishedRow(2, good)], scores)[0].error_frac is not None
    for column in good:
        for damage in DAMAGE:
            found = score_pairs([PublishedRow(2, good | {column: damage})], scores)[0]
            assert found.rejected or found.error_frac is not None
    assert "step_ratio" in score_pairs([PublishedRow(2, good | {"step_ratio": "0"})], scores)[0].rejected


@pytest.mark.parametrize("place", [0, 14])
def test_no_cell_of_a_case_stops_the_rest(place: int) -> None:
    row = read_table(DATA / "reported_cases.csv", CASE_COLUMNS)[0][place]
    further = ("MoE hidden 0", "deepseek-v3 99999999 layers", "0-layer", "last stage 99999999999 layers")
    for column in row.cells:
        for damage in (*DAMAGE, *further, "reserves 100%"):
            found = score_case(PublishedRow(row.line, row.cells | {column: damage}))
            assert found.verdict or found.left_out
