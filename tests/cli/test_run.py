"""``moeplan run``: what it refuses before it starts anything, and one real run from plan to verdict."""

import json
from pathlib import Path

import pytest

from moeplan.files import toml_text, write_text_atomically
from moeplan.hwprofiles.load import dump_profile, load_profile
from moeplan.plan import Plan
from moeplan.presets import load_model
from tests.cli.conftest import Cli
from tests.cli.test_errors import assert_one_error


@pytest.fixture
def tiny_plan(tmp_path: Path) -> Path:
    """A small MoE for two processes of a machine that is described well enough to predict."""
    profile = tmp_path / "machine.toml"
    dump_profile(load_profile("h100").model_copy(update={"name": "machine", "device": "cuda"}), profile)
    model = load_model("tiny-moe").model_copy(update={"hidden_size": 64, "num_layers": 2})
    plan = Plan(
        model=model,
        hardware=str(profile),
        num_gpus=2,
        seq_len=64,
        global_batch_size=4,
        ep=2,
        precision="fp32",
    )
    path = tmp_path / "plan.toml"
    write_text_atomically(path, toml_text(plan))
    return path


def test_more_processes_than_the_plan(cli: Cli, tiny_plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    outcome = cli("run", str(tiny_plan), "--processes", "4", "--out", str(out))
    assert_one_error(outcome.code, outcome.err, "4", "2")
    assert not out.exists()


def test_a_missing_data_file_and_a_bad_type(cli: Cli, tiny_plan: Path, tmp_path: Path) -> None:
    outcome = cli("run", str(tiny_plan), "--data", str(tmp_path / "none.bin"))
    assert_one_error(outcome.code, outcome.err, "none.bin")
    outcome = cli("run", str(tiny_plan), "--data-dtype", "int3")
    assert_one_error(outcome.code, outcome.err, "int3", "uint16")


def test_first_weights_that_are_not_there(cli: Cli, tiny_plan: Path, tmp_path: Path) -> None:
    outcome = cli("run", str(tiny_plan), "--init-from", str(tmp_path / "none"))
    assert_one_error(outcome.code, outcome.err, "none is not a folder of Hugging Face weights")
    outcome = cli("run", str(tiny_plan), "--upcycle")
    assert_one_error(outcome.code, outcome.err, "upcycle", "init_from")


def test_an_output_folder_that_cannot_be(cli: Cli, tiny_plan: Path, tmp_path: Path) -> None:
    outcome = cli("run", str(tiny_plan), "--out", str(tmp_path / "machine.toml" / "out.json"))
    assert_one_error(outcome.code, outcome.err, "out.json")


def test_token_ids_beyond_the_vocabulary(cli: Cli, tiny_plan: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "ids.bin", tmp_path / "out.json"
    data.write_bytes(b"\xff\x7f" * 4096)  # uint16 32767, vocabulary 256
    outcome = cli("run", str(tiny_plan), "--data", str(data), "--steps", "8", "--out", str(out))
    assert outcome.code == 2
    assert "token id 32767" in outcome.err
    assert "vocab_size 256" in outcome.err
    assert not out.exists()


def test_a_run_from_plan_to_verdict(cli: Cli, tiny_plan: Path, tmp_path: Path) -> None:
    """The profile is another machine's, so the verdict is exit 4: the comparison judges."""
    out = tmp_path / "out.json"
    log = tmp_path / "log"
    arguments = ("run", str(tiny_plan), "--steps", "8", "--out", str(out), "--max-step-error", "0.01", "--json")
    outcome = cli(*arguments, "--log-folder", str(log))
    assert outcome.code == 4, outcome.err
    assert "step_s" in outcome.err
    printed = json.loads(outcome.out)
    measured = printed["measured"]
    assert measured == json.loads(out.read_text())
    assert measured["kind"] == "measurement"
    assert measured["plan_id"] == printed["plan_id"] == printed["predicted"]["plan_id"]
    assert len(measured["losses"]) == 8
    assert measured["losses"][-1] < measured["losses"][0]
    judged = next(figure for figure in printed["comparison"]["figures"] if figure["name"] == "step_s")
    assert judged["error_frac"] == pytest.approx(judged["predicted"] / judged["measured"] - 1)
    rows = (log / "steps.csv").read_text(encoding="utf-8").splitlines()
    assert [float(row.split(",")[1]) for row in rows[1:]] == measured["losses"]
    outcome = cli(*arguments, "--log-folder", str(log))
    assert_one_error(outcome.code, outcome.err, str(log), "holds the log of a run")
