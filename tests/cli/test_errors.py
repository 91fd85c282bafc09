"""Bad input is one ``error:`` line and one ``hint:``, exit 2, no traceback, nothing half-written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

SEARCH = {
    "--model": "deepseek-v3",
    "--hardware": "gb300",
    "--gpus": "256",
    "--seq-len": "4096",
    "--global-batch-size": "8192",
}


def search_with(cli: Cli, **changes: str) -> tuple[int, str]:
    """Search for DeepSeek-V3 with some options changed."""
    options = SEARCH | {f"--{key.replace('_', '-')}": value for key, value in changes.items()}
    outcome = cli("search", *(part for option in options.items() for part in option))
    assert not outcome.out
    return outcome.code, outcome.err


def assert_one_error(code: int, err: str, *named: str) -> None:
    """Exit 2, an error line that names things, a hint line, nothing else."""
    lines = err.strip().splitlines()
    assert code == 2, err
    assert len(lines) == 2, err
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    for name in named:
        assert name in err


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model": "deepseek-v33"}, ("deepseek-v33", "deepseek-v3")),
        ({"hardware": "gb30"}, ("gb30", "gb300")),
        ({"stack": "megatron-bridge-26.80"}, ("megatron-bridge-26.80", "megatron-bridge-26.08")),
        ({"fix": "tp=3"}, ("tp=3", "does not divide")),
        ({"fix": "ep=48"}, ("ep=48", "48")),
        ({"fix": "ep=512", "gpus": "512"}, ("ep=512", "256 experts")),
        ({"fix": "pp=4,vp=4,layout=Et*4|(tttt"}, ("layout", "Et*4|(tttt")),
        ({"fix": "pp=4,vp=4,layout=Et*4|t|L"}, ("layout", "3 stages")),
        ({"fix": "tq=3"}, ("tq", "tp")),
        ({"fix": "tp=many"}, ("tp", "many")),
        ({"fix": "tp"}, ("--fix", "key=value")),
        ({"fix": "precision=fp7"}, ("precision", "fp7")),
        ({"fix": "recompute=moe_akt"}, ("recompute", "moe_akt")),
        ({"gpus": "0"}, ("--gpus",)),
        ({"gpus": "x"}, ("--gpus",)),
        ({"fix": "dispatcher=allgather", "stack": "megatron-bridge-26.08"}, ("megatron-bridge-26.08",)),
    ],
)
def test_bad_options_of_search(cli: Cli, changes: dict[str, str], named: tuple[str, ...]) -> None:
    assert_one_error(*search_with(cli, **changes), *named)


def test_a_missing_option_is_named(cli: Cli) -> None:
    outcome = cli("search", "--model", "deepseek-v3")
    assert_one_error(outcome.code, outcome.err, "--hardware")


@pytest.mark.parametrize(
    "config, named",
    [
        ({"model_type": "warp_drive"}, ("warp_drive", "deepseek_v3")),
        ({"model_type": "deepseek_v3", "hidden_size": 7168}, ("config.json",)),
        ({"hidden_size": 7168}, ("model_type",)),
        ([1, 2], ("config.json",)),
    ],
)
def test_bad_hugging_face_configs(cli: Cli, tmp_path: Path, config: object, named: tuple[str, ...]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert_one_error(*search_with(cli, model=str(path)), *named)


def test_truncated_files(cli: Cli, tmp_path: Path, plan_file: Path) -> None:
    plan_file.write_text(plan_file.read_text()[:-20] + '"')
    outcome = cli("predict", str(plan_file))
    assert_one_error(outcome.code, outcome.err, "plan.toml")
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "deepseek_v3"')
    assert_one_error(*search_with(cli, model=str(config)), "config.json")
    profile = tmp_path / "mine.toml"
    profile.write_text('base = "h100')
    assert_one_error(*search_with(cli, hardware=str(profile)), "mine.toml")


def test_unknown_key_and_illegal_degrees_in_a_plan_file(cli: Cli, plan_file: Path) -> None:
    good = plan_file.read_text()
    for old, new, named in (
        ("pp = 4", "pp = 4\npq = 4", "pq"),
        ("ep = 64", "ep = 48", "ep 48"),
        ("dp = 64", "dp = 63", "dp 63"),
    ):
        assert old in good
        plan_file.write_text(good.replace(old, new, 1))
        outcome = cli("predict", str(plan_file))
        assert_one_error(outcome.code, outcome.err, named, "plan.toml")


def test_run_refuses_a_plan_of_another_stack_and_more_processes(cli: Cli, plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "measurement.json"
    outcome = cli("run", str(plan_file), "--out", str(out))
    assert_one_error(outcome.code, outcome.err, "megatron-bridge-26.08", "native")
    assert not out.exists()


def test_a_file_that_cannot_be_written_is_one_error(cli: Cli, plan_file: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    outcome = cli("predict", str(plan_file), "--lock", str(blocked / "lock.json"))
    assert_one_error(outcome.code, outcome.err, "lock.json")
    assert blocked.read_text() == "in the way"


def test_nothing_fits_is_exit_3_with_the_nearest_miss(cli: Cli) -> None:
    options = SEARCH | {"--hardware": "h100", "--gpus": "8", "--global-batch-size": "64"}
    outcome = cli("search", *(part for option in options.items() for part in option), "--json")
    assert outcome.code == 3
    assert "needs" in outcome.err
    printed = json.loads(outcome.out)
    assert printed["plans"] == []
    memory = next(rejection for rejection in printed["rejections"] if rejection["wall"] == "memory")
    assert memory["needed"] > memory["available"] > 0


def test_a_reader_that_goes_away_is_no_error() -> None:
    """As ``moeplan hardware show gb300 | head`` does."""
    command = [sys.executable, "-m", "moeplan", "hardware", "show", "gb300"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert not process.stderr.read()
    assert process.returncode == 0
