"""``moeplan validate`` and ``moeplan fit`` as users run them."""

import json
from pathlib import Path

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.simulator.stack import load_stack
from tests.cli.conftest import Cli

SAMPLE = Path(__file__).parents[1] / "data" / "published_runs_sample.csv"
FIRST, SECOND = (line.split(",")[0] for line in SAMPLE.read_text().splitlines()[1:3])


def test_json_has_a_row_each_and_summaries(cli: Cli, tmp_path: Path) -> None:
    lines = SAMPLE.read_text().splitlines()
    runs, pairs = tmp_path / "runs.csv", tmp_path / "pairs.csv"
    runs.write_text("\n".join([*lines, lines[1].replace("GB300", "MI300X").replace(FIRST, "odd"), "short,line"]) + "\n")
    pairs.write_text(f"axis,id_a,id_b,step_ratio\nprecision,{FIRST},{SECOND},1.28\ngbs,{FIRST},nobody,1.1\n")
    outcome = cli("validate", str(runs), "--pairs", str(pairs), "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    by_id = {one["id"]: one for one in found["rows"]}
    assert abs(by_id[FIRST]["error_frac"]) < 0.1
    assert by_id[FIRST]["predicted_peak_memory_bytes"] > 1e11
    assert any("MI300X" in one.get("rejected", "") for one in found["rows"])
    assert found["bad_lines"][0]["line"] == len(lines) + 2
    summary = found["summary"]
    assert {"n", "coverage", "median", "p90", "bias", "by_gpu", "by_precision", "by_stack", "by_model"} <= set(summary)
    assert summary["by_gpu"]["GB300"]["n"] >= 2
    assert found["pairs"][0]["sign_right"]
    assert "nobody" in found["pairs"][1]["rejected"]
    assert found["pairs_summary"]["predicted"] == 1


def test_tables_read_without_colour(cli: Cli) -> None:
    outcome = cli("validate", str(SAMPLE), "--eval-set", "moe", "--filter", "gpu=GB300,gpu=GB200")
    assert outcome.code == 0
    assert FIRST in outcome.out
    assert "90 % below" in outcome.out
    assert "H100" not in outcome.out


def test_evaluation_sets_add_up(cli: Cli) -> None:
    ids = {
        sets: [one["id"] for one in json.loads(cli("validate", str(SAMPLE), "--eval-set", sets, "--json").out)["rows"]]
        for sets in ("moe", "dense", "moe,dense", "moe, none-such")
    }
    assert sorted(ids["moe"] + ids["dense"]) == sorted(ids["moe,dense"])
    assert ids["moe"] == ids["moe, none-such"]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("--filter", "colour=red"), "column=value"),
        (("--eval-set", "none-such"), "no row with eval_set none-such"),
    ],
)
def test_user_mistakes_are_one_error(cli: Cli, arguments: tuple[str, ...], named: str) -> None:
    outcome = cli("validate", str(SAMPLE), *arguments)
    assert outcome.code == 2
    assert named in outcome.err
    assert cli("validate", "no-such.csv").code == 2


def test_fit_writes_profiles_and_stacks_that_load(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("fit", str(SAMPLE), "--out", str(tmp_path), "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert all(one["low"] <= one["value"] <= one["high"] for one in found["constants"])
    assert set(found["held_out_error_frac"]) == set(found["group_error_frac"])
    profile = load_profile(str(tmp_path / "hardware" / "gb300-fitted.toml"))
    assert profile.sustained_frac.source == "fitted"
    assert "cross-validated" in profile.sustained_frac.ref
    stack = load_stack(str(tmp_path / "stacks" / "megatron-bridge-26.08-fitted.toml"))
    assert stack.time.exchange_contention_frac.source == "fitted"
    assert stack.time.router_kernels == load_stack("megatron-bridge-26.08").time.router_kernels
