"""``moeplan search`` over several clusters and with a training run to pay for."""

import json
import re
from pathlib import Path

import pytest

from moeplan.cli.inputs import load_plan
from tests.cli.conftest import Cli

SMALL = ("--model", "qwen3-30b-a3b", "--seq-len", "4096", "--global-batch-size", "256", "--fix", "tp=1,pp=1,ep=8,mbs=1")
DAYS_S = 86400.0


def test_clusters_are_ranked_by_what_the_tokens_cost(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    job = ("--tokens", "2T", "--deadline", "200d", "--price", "b200=4,h200=3", "--energy-price", "0.1")
    outcome = cli("search", *SMALL, "--hardware", "h200,b200", "--gpus", "8,16", *job, "--out", str(out), "--json")
    assert outcome.code == 0, outcome.err
    clusters = json.loads(outcome.out)["clusters"]
    assert {(one["hardware"], one["num_gpus"]) for one in clusters} == {
        (name, size) for name in ("h200", "b200") for size in (8, 16)
    }
    usable = [one for one in clusters if not one["problem"]]
    costs = [one["bill"]["cost_usd"] for one in usable]
    assert costs == sorted(costs)
    assert usable[0]["is_on_front"]
    for one in clusters:
        bill = one["bill"]
        rate = one["predicted"]["tokens_per_s_per_gpu"] * one["num_gpus"]
        assert bill["train_s"] == pytest.approx(2e12 / rate)
        assert bill["gpu_hours"] == pytest.approx(bill["train_s"] / 3600 * one["num_gpus"])
        assert bill["cost_usd"] == pytest.approx(bill["gpu_hours"] * {"b200": 4, "h200": 3}[one["hardware"]])
        assert bill["energy_usd"] == pytest.approx(0.1 * bill["energy_kwh"])
        assert bill["price"]["ref"] == "given with --price"
        assert (bill["train_s"] > 200 * DAYS_S) == ("allowed: 200" in one["problem"])
        assert 0.05 < one["mfu_frac"] < 1
    assert load_plan(out).plan_id == usable[0]["plan_id"]


def test_one_cluster_prints_days_cost_and_their_sources(cli: Cli) -> None:
    outcome = cli("search", *SMALL, "--hardware", "b200", "--gpus", "8", "--tokens", "1e12", "--goodput", "0.9")
    assert outcome.code == 0, outcome.err
    for text in ("1.0 T tokens: ", " GPU-hours", " USD/GPU-hour (datasheet: ", "90 % of the time in steps", "MFU "):
        assert text in outcome.out


def test_a_table_of_clusters_names_plans_and_what_does_not_work(cli: Cli) -> None:
    outcome = cli("search", *SMALL, "--hardware", "h100,b200", "--gpus", "8,12")
    assert outcome.code == 0, outcome.err
    assert "12 GPUs" in outcome.out  # ep 8 does not divide them
    assert "no plan fits: the nearest" in outcome.out  # eight H100 are too small
    assert outcome.out.index("b200") < outcome.out.index("h100")
    assert "tokens/day" in outcome.out


def test_where_no_cluster_keeps_the_limits_the_exit_code_is_3(cli: Cli) -> None:
    outcome = cli("search", *SMALL, "--hardware", "b200", "--gpus", "8,16", "--tokens", "15T", "--deadline", "2d")
    assert outcome.code == 3
    assert "no cluster will do" in outcome.err
    assert "allowed: 2" in outcome.err
    one = cli("search", *SMALL, "--hardware", "b200", "--gpus", "8", "--tokens", "15T", "--max-cost", "1k")
    assert one.code == 3
    assert "USD, allowed: 1000" in one.err


@pytest.mark.parametrize(
    "options, said",
    [
        (("--gpus", "8,x"), "--gpus: got 'x'"),
        (("--gpus", "-8"), "--gpus: got '-8'"),
        (("--gpus", "8", "--deadline", "3d"), "--deadline needs --tokens"),
        (("--gpus", "8", "--tokens", "lots"), "--tokens: got 'lots'"),
        (("--gpus", "8", "--tokens", "0"), "--tokens: got '0'"),
        (("--gpus", "8", "--tokens", "1T", "--deadline", "3 months"), "--deadline: got '3 months'"),
        (("--gpus", "8", "--tokens", "1T", "--price", "h100=2"), "--price: got 'h100'"),
        (("--gpus", "8", "--tokens", "1T", "--price", "b200=free"), "--price: got 'free'"),
        (("--gpus", "8", "--hardware", "b200,h1000"), "unknown hardware 'h1000'"),
    ],
)
def test_what_cannot_be_read_is_one_error(cli: Cli, options: tuple[str, ...], said: str) -> None:
    outcome = cli("search", *SMALL, "--hardware", "b200", *options)
    assert outcome.code == 2
    assert said in outcome.err
    assert "hint: " in outcome.err


def test_where_nothing_fits_the_hint_is_a_search_that_finds_a_plan(cli: Cli) -> None:
    asked = ("search", *SMALL[:-2], "--hardware", "h100", "--gpus", "8")
    missed = cli(*asked, "--fix", SMALL[-1], "--json")
    assert missed.code == 3
    said = re.search(r"hint: that one fits with --fix (\S+) ", missed.err)
    assert said is not None, missed.err
    assert {"fix": said[1], "needed_bytes": pytest.approx(0, abs=80 * 2**30)} in json.loads(missed.out)["reliefs"]
    assert cli(*asked, "--fix", f"{SMALL[-1]},{said[1]}").code == 0


def test_what_costs_no_precision_is_the_first_hint(cli: Cli) -> None:
    asked = (
        "search",
        "--model",
        "h200-fine",
        "--hardware",
        "h200",
        "--gpus",
        "1",
        "--seq-len",
        "4096",
        "--stack",
        "native",
    )
    pins = "precision=bf16,mbs=4,recompute=none"
    missed = cli(*asked, "--global-batch-size", "32", "--memory-margin", "0.45", "--fix", pins, "--json")
    assert missed.code == 3
    (first, *_) = json.loads(missed.out)["reliefs"]
    assert first["fix"] == "main_weight_remainders=true"
    assert f"--fix {first['fix']} " in missed.err
