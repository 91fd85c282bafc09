"""Sequences of 128K and 256K tokens: search finds plans, and their MFU stands to short context as reported."""

from typing import Any

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.planner.families import cp_kinds
from moeplan.planner.request import SearchRequest, parse_pins
from moeplan.planner.search import search
from moeplan.presets import load_model
from moeplan.simulator.predict import predict
from moeplan.simulator.stack import load_stack

BRIDGE = load_stack("megatron-bridge-26.08")
BATCH = {131072: 512, 262144: 256}
DEEPEP = {"dispatcher": "flex", "flex_backend": "deepep", "pp": 8, "vp": 4}


@pytest.mark.parametrize("seq_len", [131072, 262144])
@pytest.mark.parametrize(
    "name, hardware, num_gpus, fix",
    [
        ("qwen3-235b-a22b", "gb300", 128, "tp=4,precision=mxfp8,dispatcher=flex,mbs=1,etp=1,ep=32"),
        ("deepseek-v3", "h100", 256, "precision=fp8_blockwise,flex_backend=deepep,optimizer_cpu_frac=1,mbs=1,ep=32"),
    ],
)
def test_search_finds_plans_that_split_the_sequence(
    name: str, hardware: str, num_gpus: int, fix: str, seq_len: int
) -> None:
    profile = load_profile(hardware)
    pins = parse_pins(fix, "--fix")
    asked = SearchRequest(load_model(name), hardware, profile, BRIDGE, num_gpus, seq_len, BATCH[seq_len], pins, top_k=3)
    found = search(asked).plans
    assert found
    for ranked in found:
        assert ranked.plan.cp > 1
        assert ranked.plan.seq_len / (ranked.plan.tp * ranked.plan.cp) <= 16384  # 4K to 8K a rank (report section 6)
        seconds = {family: time.total_s for family, time in ranked.predicted.time_s.items()}
        assert max(seconds, key=seconds.__getitem__) == "attention"
        assert not {"full", "core_attn"} & set(ranked.plan.recompute)


def test_heads_are_split_inside_a_node_where_the_ring_would_leave_it() -> None:
    h100, deepseek, qwen = load_profile("h100"), load_model("deepseek-v3"), load_model("qwen3-235b-a22b")

    def kinds(model: ModelSpec, tp: int, cp: int, fix: str = "") -> list[dict[str, Any]]:
        pins = parse_pins(fix, "--fix")
        return cp_kinds(SearchRequest(model, "h100", h100, BRIDGE, 256, 131072, 512, pins), tp, cp)

    assert kinds(deepseek, 2, 16) == [{}, {"cp_comm": "a2a+p2p", "cp_a2a_size": 4}]
    assert kinds(deepseek, 1, 8) == [{}]  # the ring stays in the node
    assert kinds(deepseek, 8, 4) == [{}]  # tp fills it
    assert kinds(qwen, 4, 4) == [{}]  # one key-value head is left
    assert kinds(deepseek, 2, 16, "cp_comm=p2p") == [{}]


def test_the_reported_run_of_128k_tokens() -> None:
    """Qwen3-235B on 128 GB300: 1150 TFLOP/s a GPU (report section 9.1)."""
    plan = Plan.model_validate(
        {"model": load_model("qwen3-235b-a22b"), "hardware": "gb300", "num_gpus": 128, "stack": BRIDGE.name}
        | {"seq_len": 131072, "global_batch_size": 1024, "tp": 4, "cp": 4, "pp": 4, "vp": 12, "ep": 32}
        | {"precision": "mxfp8", "dispatcher": "flex", "recompute": ("moe_act", "layernorm")}
        | {"cuda_graph": ("attn", "moe_router", "moe_preprocess"), "fp8_primary_weights": True}
    )
    found = predict(plan, load_profile("gb300"), BRIDGE)
    assert found.model_tflops_per_gpu == pytest.approx(1150, rel=0.1)


def _tflops(name: str, **changes: Any) -> float:
    fields = {"model": load_model(name), "hardware": "h100", "num_gpus": 256, "stack": BRIDGE.name, **DEEPEP}
    return predict(Plan.model_validate(fields | changes), load_profile("h100"), BRIDGE).model_tflops_per_gpu


def test_256k_tokens_against_short_context() -> None:
    """Reported: DeepSeek-V3 at 88 % of its short-context MFU, Qwen3-235B at 129 % (report section 6), on 256 Hopper.

    Short context is each model's best published H100 run (report section 9.1). Nothing is fitted to the two ratios.
    """
    overlap = {"ep_overlap": True, "delay_wgrad": True, "seq_len": 4096, "tp": 2}
    lean = {"recompute": ("layernorm", "mla_up_proj", "mlp", "moe"), "optimizer_cpu_frac": 1.0, "ep": 32}
    # The report's layout of 32 stages, in which the first rank's dense layers attend as long as any other.
    deepseek = {"precision": "fp8_blockwise", "layout": "Et*3|(tt|)*29m|L"}
    short = _tflops(
        "deepseek-v3",
        **deepseek
        | overlap
        | {"num_gpus": 1024, "ep": 64, "global_batch_size": 8192, "recompute": ("mla_up_proj", "mlp")},
    )
    long = _tflops("deepseek-v3", **deepseek | lean | {"seq_len": 262144, "global_batch_size": 240, "tp": 32})
    assert long / short == pytest.approx(0.88, abs=0.1)
    kept = {"cuda_graph": ("attn", "moe_router", "moe_preprocess"), "recompute": ("layernorm", "moe_act"), "ep": 32}
    short = _tflops("qwen3-235b-a22b", **overlap | kept | {"global_batch_size": 2048})
    long = _tflops(
        "qwen3-235b-a22b",
        recompute=("layernorm", "moe"),
        ep=8,
        tp=4,
        cp=8,
        seq_len=262144,
        global_batch_size=128,
    )
    assert long / short == pytest.approx(1.29, abs=0.2)
