"""Locks: recorded predictions hold, and say what moved when they do not."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from moeplan.hwprofiles.load import dump_profile, load_profile
from tests.cli.conftest import Cli


@pytest.fixture
def locked(cli: Cli, plan_file: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A lock of the plan on a profile of its own; returns lock and profile."""
    profile = tmp_path / "mine.toml"
    dump_profile(load_profile("gb300"), profile)
    plan_file.write_text(plan_file.read_text().replace('hardware = "gb300"', f'hardware = "{profile}"'))
    lock = tmp_path / "lock.json"
    assert cli("predict", str(plan_file), "--lock", str(lock)).code == 0
    return lock, profile


def test_an_unchanged_lock_passes_with_reports(cli: Cli, locked: tuple[Path, Path], tmp_path: Path) -> None:
    lock, _ = locked
    junit, markdown = tmp_path / "junit.xml", tmp_path / "check.md"
    outcome = cli("check", str(lock), "--junit", str(junit), "--markdown", str(markdown))
    assert outcome.code == 0, outcome.err
    suite = ET.parse(junit).getroot()  # noqa: S314 - our own file
    assert (suite.get("tests"), suite.get("failures")) == ("2", "0")
    assert "| step_s |" in markdown.read_text()


def test_a_profile_edited_by_5_percent_fails_naming_the_figure(
    cli: Cli, locked: tuple[Path, Path], tmp_path: Path
) -> None:
    lock, path = locked
    profile = load_profile(str(path))
    slower = [
        curve.model_copy(update={"flops_per_s": [0.95 * rate for rate in curve.flops_per_s]}) for curve in profile.gemm
    ]
    grouped = [
        curve.model_copy(update={"flops_per_s": [0.95 * rate for rate in curve.flops_per_s]})
        for curve in profile.grouped_gemm
    ]
    dump_profile(profile.model_copy(update={"gemm": slower, "grouped_gemm": grouped}), path)
    junit = tmp_path / "junit.xml"
    outcome = cli("check", str(lock), "--junit", str(junit))
    assert outcome.code == 4
    assert "step_s" in outcome.err
    assert "peak_memory_bytes" not in outcome.err
    assert ET.parse(junit).getroot().get("failures") == "1"  # noqa: S314 - our own file
    assert cli("check", str(lock), "--tolerance", "0.5").code == 0
    assert cli("check", str(lock), "--update").code == 0
    assert cli("check", str(lock)).code == 0


def test_a_lock_of_another_version_is_explained(cli: Cli, locked: tuple[Path, Path]) -> None:
    lock, _ = locked
    data = json.loads(lock.read_text())
    lock.write_text(json.dumps(data | {"lock_version": 99, "moeplan_version": "9.9"}))
    outcome = cli("check", str(lock))
    assert outcome.code == 2
    assert "99" in outcome.err
    assert "9.9" in outcome.err
    lock.write_text(json.dumps(data | {"moeplan_version": "0.0.1"}))
    outcome = cli("check", str(lock))
    assert outcome.code == 0
    assert "0.0.1" in outcome.err


@pytest.mark.parametrize("text", ["{", "[]", '{"lock_version": 1, "entries": 3}', ""])
def test_a_corrupt_lock_is_one_line(cli: Cli, tmp_path: Path, text: str) -> None:
    lock = tmp_path / "lock.json"
    lock.write_text(text)
    outcome = cli("check", str(lock))
    assert outcome.code == 2
    assert len(outcome.err.strip().splitlines()) == 2
    assert "lock.json" in outcome.err


def test_compare_names_what_changed_and_what_moved(cli: Cli, plan_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(plan_file.read_text().replace("recompute = []", 'recompute = ["mla_up_proj"]'))
    outcome = cli("compare", str(plan_file), str(other))
    assert outcome.code == 0, outcome.err
    assert "mla_up_proj" in outcome.out
    assert "activations -" in outcome.out
    printed = json.loads(cli("compare", str(plan_file), str(other), "--json").out)
    assert "recompute" in printed[0]["changes"]


def test_a_lock_on_other_hardware_says_so(cli: Cli, plan_file: Path, tmp_path: Path) -> None:
    lock = tmp_path / "other.json"
    assert cli("predict", str(plan_file), "--hardware", "gb200", "--lock", str(lock)).code == 0
    (entry,) = json.loads(lock.read_text())["entries"]
    assert entry["plan"]["hardware"] == entry["recorded"]["hardware"] == "gb200"
    assert cli("check", str(lock)).code == 0
