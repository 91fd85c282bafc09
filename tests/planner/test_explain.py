"""Neighbours and ablations of a plan."""

from typing import Any

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.plan import Plan
from moeplan.planner.explain import ablations, critical_phases, neighbours
from moeplan.planner.request import SearchRequest, parse_pins
from moeplan.planner.search import search
from moeplan.presets import load_model
from moeplan.report.explain import why
from moeplan.simulator.predict import predict
from moeplan.simulator.stack import load_stack

GB300, BRIDGE = load_profile("gb300"), load_stack("megatron-bridge-26.08")


@pytest.fixture(scope="module")
def request_() -> SearchRequest:
    """DeepSeek-V3 on 256 GB300, folded as in the report."""
    pins = parse_pins("pp=4,vp=4,ep=64,tp=1,mbs=1,precision=mxfp8,dispatcher=flex", "--fix")
    return SearchRequest(load_model("deepseek-v3"), "gb300", GB300, BRIDGE, 256, 4096, 8192, pins, top_k=1)


def test_neighbours_are_one_step_away_and_say_why_they_cannot_be(request_: SearchRequest) -> None:
    best = search(request_).plans[0]
    found = {one.change: one for one in neighbours(best.plan, GB300, BRIDGE)}
    doubled = found["ep 64 -> 128"]
    assert doubled.predicted is None
    assert "512 does not divide" in doubled.problem
    half = found["pp 4 -> 2"].predicted
    assert half is not None
    assert half.memory_bytes["weights"][0] > best.predicted.memory_bytes["weights"][0]
    assert found["recompute mla_up_proj"].predicted is not None
    assert "dispatcher hybridep -> alltoall" in found
    assert "bubble" in why(best.predicted, half)


def test_modules_that_a_model_lacks_are_no_step() -> None:
    plan = Plan(
        model=load_model("qwen3-30b-a3b"), hardware="gb300", num_gpus=8, seq_len=4096, global_batch_size=64, ep=8
    )
    found = {one.change for one in neighbours(plan, GB300, BRIDGE)}
    assert found.isdisjoint({"recompute mlp", "recompute mla_up_proj", "recompute shared_experts"})
    assert {"recompute moe", "recompute full"} <= found


def test_leaving_a_technique_out_never_speeds_the_step_up(request_: SearchRequest) -> None:
    best = search(request_).plans[0]
    found = ablations(best.plan, GB300, BRIDGE)
    assert {one.change for one in found} >= {"without overlap", "without low precision", "without CUDA graphs"}
    for one in found:
        assert one.predicted is not None, one
        assert one.predicted.step_s >= best.predicted.step_s


@pytest.mark.parametrize(
    "fields, left_out",
    [
        ({"precision": "fp32"}, {"without overlap"}),  # wide, and no gain of low precision
        ({"dispatcher": "allgather", "ep": 8, "overlap_grad_reduce": False, "overlap_param_gather": False}, set()),
        ({"dispatcher": "flex", "ep": 8}, {"without overlap", "without a deduplicating dispatcher"}),
        ({"overlap_param_gather": False}, {"without overlap"}),  # gradients still travel beside compute
    ],
)
def test_only_techniques_that_a_plan_has_are_left_out(fields: dict[str, Any], left_out: set[str]) -> None:
    sizes = {"num_gpus": 8, "seq_len": 4096, "global_batch_size": 64}
    shared = {"model": load_model("qwen3-30b-a3b"), "hardware": "h100", "stack": "native"} | sizes
    plan = Plan.model_validate(shared | fields)
    found = {one.change for one in ablations(plan, load_profile("h100"), load_stack("native"))}
    assert found == left_out | {"without grouped GEMM"}


def _without_grouped_gemm_frac(model: str, **fields: Any) -> float:
    """Part by which a step on 8 H100 is longer where a rank's experts run one after another."""
    h100 = load_profile("h100")
    sizes = {"num_gpus": 8, "seq_len": 4096, "global_batch_size": 1024}
    plan = Plan.model_validate({"model": load_model(model), "hardware": "h100", "stack": BRIDGE.name} | sizes | fields)
    found = {one.change: one.predicted for one in ablations(plan, h100, BRIDGE)}["without grouped GEMM"]
    assert found is not None
    return found.step_s / predict(plan, h100, BRIDGE).step_s - 1


def test_fine_grained_experts_need_grouped_gemm_and_coarse_ones_hardly() -> None:
    fine = _without_grouped_gemm_frac("qwen3-30b-a3b")  # 128 experts a rank of 256 rows
    spread = _without_grouped_gemm_frac("qwen3-30b-a3b", ep=8)  # 16 experts of 2048 rows
    coarse = _without_grouped_gemm_frac("mixtral-8x7b")  # 8 experts of 1024 rows, 18 times as wide
    assert fine > 0.15
    assert 0 < coarse < 0.05
    assert 0 < spread < 0.25 * fine


def test_graphs_that_hold_experts_go_with_grouped_gemm(request_: SearchRequest) -> None:
    best = search(request_).plans[0]
    assert best.plan.cuda_graph == ("full_iteration",)
    found = {one.change: one.predicted for one in ablations(best.plan, GB300, BRIDGE)}["without grouped GEMM"]
    assert found is not None
    assert found.stack.endswith("without grouped GEMM")
    assert found.time_s["host"].exposed_s > best.predicted.time_s["host"].exposed_s


def test_one_expert_a_rank_has_nothing_to_group() -> None:
    plan = Plan(model=load_model("mixtral-8x7b"), hardware="h100", num_gpus=8, ep=8, seq_len=4096, global_batch_size=8)
    assert "without grouped GEMM" not in {one.change for one in ablations(plan, load_profile("h100"), BRIDGE)}


def test_kinds_of_context_parallelism_are_neighbours() -> None:
    fields = {"model": load_model("deepseek-v3"), "hardware": "gb300", "num_gpus": 256, "stack": BRIDGE.name}
    plan = Plan.model_validate(fields | {"seq_len": 65536, "global_batch_size": 512, "cp": 8, "pp": 8, "ep": 32})
    found = {one.change: one for one in neighbours(plan, GB300, BRIDGE)}
    assert found["cp_comm p2p -> a2a"].predicted is not None
    gathered = found["cp_comm p2p -> all_gather"].predicted
    assert gathered is not None
    assert gathered.time_s["cp_comm"].exposed_s > predict(plan, GB300, BRIDGE).time_s["cp_comm"].exposed_s


def test_critical_paths_of_every_kind_of_layer_make_up_its_phases(request_: SearchRequest) -> None:
    phases = critical_phases(search(request_).plans[0].plan, GB300, BRIDGE)
    assert [(one.part, one.phase) for one in phases] == [
        ("dense", "forward"), ("dense", "backward"), ("moe", "forward"), ("moe", "backward"),
    ]  # fmt: skip
    for one in phases:
        assert 0 < sum(one.by_family.values()) <= one.seconds * (1 + 1e-9)
    assert ("dispatch", "dispatch") in phases[2].by_family
    assert ("dispatch", "dispatch") not in phases[0].by_family
