"""What layers keep in flight: padding, imbalance, offload, graphs and overlap."""

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.model_spec import DENSE_LAYER, MOE_LAYER
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.layer_state import expert_row_factor, layer_bytes, layer_parts, offloaded_bytes, on_device_frac
from moeplan.simulator.memory import memory_by_rank
from moeplan.simulator.placement import Chunk
from moeplan.simulator.stack import load_stack

MEGATRON = load_stack("megatron-bridge-26.08")
GB300 = load_profile("gb300")
MIB = 2**20


def qwen_plan(**fields: Any) -> Plan:
    return Plan(
        model=load_model("qwen3-30b-a3b"), hardware="gb300", num_gpus=8, seq_len=4096, global_batch_size=64, ep=8,
        stack="megatron-bridge-26.08", **fields,
    )  # fmt: skip


def activations(plan: Plan) -> float:
    return max(memory_by_rank(plan.model, plan.point, MEGATRON, GB300)["activations"])


@pytest.mark.parametrize(
    "changes, factor",
    [
        ({}, 1),
        ({"precision": "mxfp8"}, 1 + 15.5 * 16 / (4096 * 8)),  # 16 local experts, half of 31 rows each
        ({"precision": "nvfp4"}, 1 + 63.5 * 16 / (4096 * 8)),
        (
            {"routing": "natural"},
            1 + MEGATRON.time.choice_spread_frac.value * 16 / 4 * NormalDist().inv_cdf(7.625 / 8.25),
        ),
        ({"routing": "drop"}, 1),
    ],
)
def test_rows_of_the_busiest_rank(changes: dict[str, Any], factor: float) -> None:
    plan = qwen_plan(**changes)
    assert expert_row_factor(plan.model, plan.point, MEGATRON) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("offload_layers, frac", [(0, 1), (2, 3 / 5), (4, 1 / 5), (9, 1 / 5)])
def test_layers_of_all_chunks_of_a_rank_count(offload_layers: int, frac: float) -> None:
    chunks = (Chunk(((DENSE_LAYER, 1), (MOE_LAYER, 1)), 0, has_loss=False), Chunk(((MOE_LAYER, 2),), 1, has_loss=True))
    assert on_device_frac(chunks, offload_layers) == pytest.approx(frac)
    assert on_device_frac((Chunk((), 0, has_loss=True),), offload_layers) == 1


@pytest.mark.parametrize("changes", [{}, {"precision": "mxfp8", "routing": "natural"}, {"cuda_graph": ["attn"]}])
def test_parts_sum_to_the_layer(changes: dict[str, Any]) -> None:
    plan = qwen_plan(**changes)
    parts = sum(size_bytes for _, _, size_bytes in layer_parts(plan.model, MOE_LAYER, plan.point, MEGATRON))
    assert parts == pytest.approx(layer_bytes(plan.model, MOE_LAYER, plan.point, MEGATRON), rel=1e-12)


def test_partial_graphs_hold_about_seven_gigabytes(report_plan: Plan) -> None:
    """Report section 1.6, on the rank that holds most layers in flight."""
    graphed = report_plan.replace(cuda_graph=["attn", "moe_router", "moe_preprocess"], layout=report_plan.layout)
    assert activations(graphed) - activations(report_plan) == pytest.approx(7e9, rel=0.1)


def test_offloaded_modules_keep_one_layer_here() -> None:
    """Expert inputs of 48 layers leave; those of one are on the device for backward (report section 1.6)."""
    plan, offloaded = qwen_plan(), qwen_plan(offload_modules=["expert_fc1"])
    rows = 4096 * 8 * 2048 * 2
    assert offloaded_bytes(offloaded.model, MOE_LAYER, offloaded.point, MEGATRON) == rows
    assert activations(plan) - activations(offloaded) == 47 * rows
    both = offloaded_bytes(plan.model, MOE_LAYER, replace(plan.point, offload_modules=("fused_group_mlp",)), MEGATRON)
    assert both == rows + 4096 * 8 * 2 * 768 * 2


def test_offloaded_layers_leave_one_at_least() -> None:
    plan = qwen_plan()
    layer = layer_bytes(plan.model, MOE_LAYER, plan.point, MEGATRON)
    assert activations(plan) - activations(qwen_plan(offload_layers=24)) == pytest.approx(24 * layer)
    assert activations(plan) - activations(qwen_plan(offload_layers=100)) == pytest.approx(47 * layer)


def test_a_stack_may_hold_two_layers_of_what_it_offloads() -> None:
    """The executor: one layer's copies are under way while the next one runs."""
    native = load_stack("native")

    def held(**fields: Any) -> float:
        plan = qwen_plan(**fields)
        return max(memory_by_rank(plan.model, plan.point, native, GB300)["activations"])

    plan, rows = qwen_plan(), 4096 * 8 * 2048 * 2
    layer = layer_bytes(plan.model, MOE_LAYER, plan.point, native)
    assert held() - held(offload_modules=["expert_fc1"]) == 46 * rows
    assert held() - held(offload_layers=46) == pytest.approx(46 * layer)
    assert held() - held(offload_layers=47) == pytest.approx(46 * layer)


def test_overlap_holds_a_layer_more_without_pipeline_and_a_chunk_more_with_one(report_plan: Plan) -> None:
    plan = qwen_plan()
    layer = layer_bytes(plan.model, MOE_LAYER, plan.point, MEGATRON)
    assert activations(qwen_plan(ep_overlap=True)) - activations(plan) == pytest.approx(layer)
    ahead = report_plan.replace(ep_overlap=True, layout=report_plan.layout)
    kept = [
        memory_by_rank(one.model, one.point, MEGATRON, GB300)["activations"][2] / (2236 * MIB)
        for one in (report_plan, ahead)
    ]
    assert kept == [60, 64]


def test_offloaded_states_count_while_nothing_else_runs() -> None:
    plan, offloaded = qwen_plan(), qwen_plan(offload_optimizer_states=True)
    before = memory_by_rank(plan.model, plan.point, MEGATRON, GB300)
    after = memory_by_rank(offloaded.model, offloaded.point, MEGATRON, GB300)
    assert after["optimizer"] == before["optimizer"]  # the step needs more than the layers do
    assert max(after["activations"]) == 0
    large = qwen_plan(offload_optimizer_states=True, mbs=4)
    running = memory_by_rank(large.model, large.point, MEGATRON, GB300)
    assert max(running["optimizer"]) == 0
    assert running["activations"][0] > 4 * 0.9 * before["activations"][0]
