"""``moeplan validate --cases``."""

import json
from pathlib import Path

from tests.cli.conftest import Cli

CASES = Path(__file__).parents[1] / "data" / "reported_cases.csv"


def test_json_has_every_case_and_the_summary(cli: Cli) -> None:
    printed = cli("validate", "--cases", str(CASES), "--json")
    found = json.loads(printed.out)
    assert printed.code == 0
    assert len(found["cases"]) == len(CASES.read_text().splitlines()) - 1
    assert found["summary"]["balanced_accuracy"] == 1
    assert found["summary"]["legality"]["right"] == found["summary"]["legality"]["n"] > 10
    assert found["summary"]["left_out"] == 0


def test_report_ends_with_the_summary_and_lists_what_is_left_out(cli: Cli, tmp_path: Path) -> None:
    unknown = tmp_path / "cases.csv"
    unknown.write_text(CASES.read_text().replace("Nemotron-3-Super-120B-A12B", "Nemotron-9"))
    printed = cli("validate", "--cases", str(unknown))
    assert "balanced accuracy of memory" in printed.out
    assert "unknown model 'nemotron-9'" in printed.out


def test_one_table_is_asked_for(cli: Cli) -> None:
    for arguments in (("validate",), ("validate", "runs.csv", "--cases", str(CASES))):
        printed = cli(*arguments)
        assert printed.code == 2
        assert "give a CSV of measured runs, or --cases" in printed.err
