"""What the commands print when all is well."""

import json
from pathlib import Path

import pytest

from moeplan.cli.inputs import load_plan
from moeplan.cli.stacks import figures_of
from moeplan.files import toml_text, write_text_atomically
from moeplan.hwprofiles.load import dump_profile, load_profile
from moeplan.plan import Plan
from moeplan.presets import load_model, model_names
from moeplan.simulator.stack import load_stack, stack_names
from moeplan.vocabulary import MEMORY_CATEGORIES, OP_FAMILIES
from tests.cli.conftest import Cli

PREDICTED_KEYS = {
    "step_s",
    "tokens_per_s_per_gpu",
    "model_tflops_per_gpu",
    "peak_memory_bytes",
    "memory_bytes",
    "time_s",
    "stack",
    "error_bar_frac",
}


def test_search_gives_the_json_that_callers_rely_on(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "best.toml"
    options = "--model deepseek-v3 --hardware gb300 --gpus 256 --seq-len 4096 --global-batch-size 8192 --top 3"
    outcome = cli("search", *options.split(), "--fix", "pp=4,ep=64,tp=1", "--out", str(out), "--json")
    assert outcome.code == 0, outcome.err
    printed = json.loads(outcome.out)
    assert len(printed["plans"]) == 3
    best = printed["plans"][0]
    assert {"plan_id", "plan", "predicted"} <= best.keys()
    assert {"tp", "cp", "dp", "pp", "vp", "etp", "ep", "edp", "mbs", "layout"} <= best["plan"].keys()
    assert best["predicted"].keys() >= PREDICTED_KEYS
    assert set(best["predicted"]["memory_bytes"]) == set(MEMORY_CATEGORIES)
    assert set(best["predicted"]["time_s"]) <= set(OP_FAMILIES)
    assert {len(ranks) for ranks in best["predicted"]["memory_bytes"].values()} == {4}
    assert {"points", "costed", "seconds", "proven"} == printed["space"].keys()
    assert load_plan(out).plan_id == best["plan_id"]


def test_search_prints_the_layout_and_the_walls(cli: Cli) -> None:
    options = "--model deepseek-v3 --hardware gb300 --gpus 256 --seq-len 4096 --global-batch-size 8192"
    outcome = cli("search", *options.split(), "--fix", "pp=4,vp=4,ep=64,tp=1")
    assert outcome.code == 0, outcome.err
    assert "layout Et*4|(tttt|)*14tmL" in outcome.out
    assert "memory wall" in outcome.out
    assert "expert_gemm" in outcome.out


def test_the_exposed_times_of_a_prediction_add_up_to_the_step(cli: Cli, plan_file: Path) -> None:
    predicted = json.loads(cli("predict", str(plan_file), "--json").out)["predicted"]
    exposed_s = sum(family["exposed_s"] for family in predicted["time_s"].values())
    assert exposed_s == pytest.approx(predicted["step_s"], rel=1e-6)
    sums = [sum(ranks) for ranks in zip(*predicted["memory_bytes"].values(), strict=True)]
    assert max(sums) == pytest.approx(predicted["peak_memory_bytes"])


def test_predict_shows_memory_by_rank_and_writes_a_trace(cli: Cli, plan_file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    outcome = cli("predict", str(plan_file), "--trace", str(trace))
    assert outcome.code == 0, outcome.err
    assert "rank 2" in outcome.out
    assert "fits" in outcome.out
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) >= 2 * 4 * 4 * 128  # every forward and backward chunk


def test_predict_without_a_plan_file(cli: Cli) -> None:
    outcome = cli(
        *("predict", "--model", "qwen3-30b-a3b", "--hardware", "h100", "--gpus", "16"),
        *("--global-batch-size", "512", "--fix", "ep=8,mbs=2", "--json"),
    )
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["plan"]["edp"] == 2


def test_models_and_hardware_list_and_show(cli: Cli) -> None:
    listed = json.loads(cli("models", "--json").out)
    assert {model["name"] for model in listed} == set(model_names())
    assert "671.0 B" in cli("models", "show", "deepseek-v3").out
    shown = cli("hardware", "show", "gb300").out
    assert "memory_bytes" in shown
    assert "assumed" in shown
    assert "298013687808" not in cli("hardware").out  # lists in GiB
    assert json.loads(cli("hardware", "show", "gb300", "--json").out)["memory_bytes"]["value"] == 298013687808


def test_a_dry_run_checks_and_predicts_and_starts_nothing(cli: Cli, tmp_path: Path) -> None:
    profile = tmp_path / "machine.toml"
    dump_profile(load_profile("h100").model_copy(update={"name": "machine"}), profile)
    plan = Plan(
        model=load_model("tiny-moe"),
        hardware=str(profile),
        num_gpus=4,
        seq_len=256,
        global_batch_size=16,
        ep=4,
        precision="bf16",
    )
    path, out = tmp_path / "plan.toml", tmp_path / "measurement.json"
    write_text_atomically(path, toml_text(plan))
    outcome = cli("run", str(path), "--dry-run", "--out", str(out))
    assert outcome.code == 0, outcome.err
    assert "tiny-moe" in outcome.out
    found = json.loads(cli("run", str(path), "--dry-run", "--json", "--out", str(out)).out)
    assert found["plan_id"] == plan.plan_id
    assert found["predicted"]["step_s"] > 0
    for arguments, named in (
        (("--steps", "4"), "steps: got 4, allowed: more than"),
        (("--processes", "2"), "processes: got 2 for a plan of 4"),
        (("--data", str(tmp_path / "none.bin")), "none.bin"),
        (("--resume",), "resume: got True without save_folder"),
    ):
        refused = cli("run", str(path), "--dry-run", "--out", str(out), *arguments)
        assert refused.code == 2
        assert named in refused.err
    write_text_atomically(path, toml_text(plan.replace(permute_fusion=False)))
    assert "permute_fusion: got False" in cli("run", str(path), "--dry-run", "--out", str(out)).err
    assert not out.exists()


def test_memory_tensor_by_tensor_is_table_3_of_the_report(cli: Cli, plan_file: Path) -> None:
    """Pipeline rank 2 holds 16 MoE layers and 60 of their micro-batches (report sections 1.3 and 1.4).

    The report's table leaves router and norms out, which are 0.17 GiB.
    """
    plan_file.write_text(plan_file.read_text().replace('precision = "mxfp8"', 'precision = "bf16"'))
    items = json.loads(cli("predict", str(plan_file), "--rank", "2", "--json").out)["memory_items"]
    scope = {"attention", "shared_experts", "experts"}

    def gib(*categories: str) -> float:
        chosen = (item for item in items if item["category"] in categories and item["component"] in scope)
        return float(sum(item["size_bytes"] for item in chosen)) / 2**30

    assert gib("weights", "gradients") == pytest.approx(36.4, abs=0.05)
    assert gib("optimizer") == pytest.approx(32.15, abs=0.05)
    activations = sum(item["size_bytes"] for item in items if item["category"] == "activations")
    assert activations == 60 * 2236 * 2**20
    largest = next(item for item in items if item["name"] == "expert FC1 input")
    assert largest["size_bytes"] == 60 * 448 * 2**20
    refused = cli("predict", str(plan_file), "--rank", "4")
    assert refused.code == 2
    assert "0 to 3" in refused.err


def test_stacks_list_and_show_every_figure_with_its_source(cli: Cli) -> None:
    listed = cli("stacks").out
    assert all(name in listed for name in stack_names())
    shown = cli("stacks", "show", "megatron-bridge-26.08")
    assert shown.code == 0, shown.err
    stack = load_stack("megatron-bridge-26.08")
    keys = [key for key, _, _ in figures_of(stack)]
    assert "time.quantize_bytes_per_element.mxfp8" in keys
    assert all(key in shown.out for key in keys)
    document = json.loads(cli("stacks", "show", "megatron-bridge-26.08", "--json").out)
    assert document["time"]["gemm_frac"]["source"] in {"measured", "fitted", "assumed", "datasheet"}
    assert cli("stacks", "show", "megatron").code == 2
