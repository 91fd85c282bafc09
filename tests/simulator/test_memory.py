"""Memory by rank: the report's tables to the printed digit, published peaks, and what never grows."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.layout import balanced_layout
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.memory import memory_by_rank, memory_items, peak_memory_bytes, peak_of_reading
from moeplan.simulator.stack import load_stack
from moeplan.simulator.training_state import bytes_per_parameter
from moeplan.vocabulary import MEMORY_CATEGORIES

GIB = 2**30
MEGATRON = load_stack("megatron-bridge-26.08")
GB300 = load_profile("gb300")
CPU = GB300.model_copy(update={"device": "cpu"})
LINEARS = {"attention", "shared_experts", "experts"}  # the scope of the report's table 3


def component_gib(plan: Plan, rank: int, *categories: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in memory_items(plan.model, plan.point, MEGATRON, rank):
        if item.category in categories:
            found[item.component] = found.get(item.component, 0.0) + item.size_bytes / GIB
    return found


def test_table_3_of_the_report(report_plan: Plan) -> None:
    """Pipeline rank 2, 16 MoE layers: weights and gradients 36.4, optimizer 32.1, activations 131.0 GiB."""
    states = component_gib(report_plan, 2, "weights", "gradients")
    optimizer = component_gib(report_plan, 2, "optimizer")
    activations = component_gib(report_plan, 2, "activations")
    assert set(states) == LINEARS | {"norms", "router"}
    assert sum(states[name] for name in LINEARS) == pytest.approx(36.4, abs=0.05)
    assert sum(optimizer[name] for name in LINEARS) == pytest.approx(32.1, abs=0.05)
    assert sum(activations.values()) == pytest.approx(2236 * 60 / 1024, rel=1e-12)  # 131.0 GiB
    outside = states["norms"] + states["router"] + optimizer["norms"] + optimizer["router"]
    assert outside < 0.2


@pytest.mark.parametrize(
    "changes, saved_gib",
    [
        ({"memory_efficient_permutation": True}, 26.25),
        ({"precision": "mxfp8"}, 18.3),  # block scales come on top
        ({"recompute": ("mla_up_proj",)}, 30.0),
        ({"recompute": ("moe_act",)}, 7.5),  # routed experts: Megatron's grouped MLP alone has the switch
        ({"recompute": ("layernorm",)}, 6.56),
        ({"recompute": ("layernorm", "mla_up_proj", "moe_act")}, 30.0 + 7.5 + 6.56),  # 45.0 with the shared expert's
    ],
)
def test_savings_of_the_report(report_plan: Plan, changes: dict[str, Any], saved_gib: float) -> None:
    """The analytic column of report section 1.6, over the 60 layers in flight of its table 3."""

    def kept_gib(plan: Plan) -> float:
        found = component_gib(plan, 2, "activations")
        return sum(size for name, size in found.items() if name != "block_scales")

    changed = report_plan.replace(**changes, layout=report_plan.layout)
    assert kept_gib(report_plan) - kept_gib(changed) == pytest.approx(saved_gib, rel=0.02)


def test_readings_hold_more_and_more(report_plan: Plan) -> None:
    """Allocated, with the allocator's reserve, and with what is outside PyTorch."""
    model, point = report_plan.model, report_plan.point
    allocated, reserved = (
        peak_of_reading(model, point, MEGATRON, GB300, reading) for reading in ("allocated", "reserved")
    )
    assert reserved == pytest.approx(allocated * (1 + MEGATRON.allocator_reserve_frac.value), rel=1e-12)
    assert peak_of_reading(model, point, MEGATRON, GB300, "device") == peak_memory_bytes(model, point, MEGATRON, GB300)


def test_layers_in_flight_of_the_report(report_plan: Plan) -> None:
    """19, 17, 15 and 13 chunks of four layers; rank 0 trades three of its MoE layers for dense ones."""
    activations = memory_by_rank(report_plan.model, report_plan.point, MEGATRON, GB300)["activations"]
    layer = 2236 * 2**20
    assert activations[1] / layer == 68
    assert activations[2] / layer == 60
    assert activations[0] / layer < 76
    assert activations[3] / layer < 60


def test_worst_rank_decides(report_plan: Plan) -> None:
    by_category = memory_by_rank(report_plan.model, report_plan.point, MEGATRON, GB300)
    sums = [sum(column) for column in zip(*by_category.values(), strict=True)]
    assert peak_memory_bytes(report_plan.model, report_plan.point, MEGATRON, GB300) == max(sums)
    assert tuple(by_category) == MEMORY_CATEGORIES


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "mxfp8"},
        {"recompute": ("full",)},
        {"dispatcher": "flex", "recompute": ("moe", "layernorm")},
        {"sharding": "none", "cp": 2, "layout": ""},
        {"sharding": "full", "vp": 1, "layout": ""},
        {"precision": "mxfp8", "fp8_primary_weights": True, "routing": "natural"},
        {"cuda_graph": ["attn", "moe_router"], "offload_modules": ["expert_fc1", "moe_act"]},
        {"ep_overlap": True, "delay_wgrad": True},
        {"offload_optimizer_states": True},
        {"offload_layers": 3, "optimizer_cpu_frac": 0.5},
    ],
)
def test_items_sum_to_the_categories(report_plan: Plan, changes: dict[str, Any]) -> None:
    plan = report_plan.replace(**changes)
    by_category = memory_by_rank(plan.model, plan.point, MEGATRON, GB300)
    for rank in range(plan.pp):
        sums = dict.fromkeys(MEMORY_CATEGORIES, 0.0)
        for item in memory_items(plan.model, plan.point, MEGATRON, rank):
            sums[item.category] += item.size_bytes
        for category in MEMORY_CATEGORIES[:-1]:
            assert sums[category] == pytest.approx(by_category[category][rank], rel=1e-12)


def test_framework_is_context_and_what_the_allocator_reserves(report_plan: Plan) -> None:
    gpu = memory_by_rank(report_plan.model, report_plan.point, MEGATRON, GB300)
    allocated = sum(gpu[category][1] for category in MEMORY_CATEGORIES[:-1])
    context, reserve = GB300.framework_overhead_bytes.value, MEGATRON.allocator_reserve_frac.value
    assert gpu["framework"][1] == pytest.approx(context + reserve * allocated, rel=1e-12)
    cpu = memory_by_rank(report_plan.model, report_plan.point, MEGATRON, CPU)
    assert set(cpu["framework"]) == {context}


@pytest.mark.parametrize(
    "changes, whole, sharded",
    [
        ({}, 18, (6, 12)),
        ({"moment_dtype": "bf16"}, 14, (6, 8)),
        ({"grad_dtype": "bf16", "moment_dtype": "bf16"}, 12, (4, 8)),
        ({"precision": "fp32"}, 16, (8, 8)),
        ({"precision": "fp64", "grad_dtype": "fp64", "moment_dtype": "fp64"}, 32, (16, 16)),
        ({"precision": "mxfp8", "moment_dtype": "bf16"}, 16, (8, 8)),
        ({"precision": "fp8_blockwise"}, 20, (8, 12)),
    ],
)
def test_bytes_per_parameter(
    report_plan: Plan, changes: dict[str, Any], whole: float, sharded: tuple[float, float]
) -> None:
    """Report section 1.2: with d = dp x cp = 64 for dense parameters and d = edp = 1 for experts."""
    point = replace(report_plan.point, **changes)
    replicated = replace(point, sharding="none")
    for is_expert in (False, True):
        assert sum(bytes_per_parameter(replicated, is_expert=is_expert, is_quantized=True)) == whole
    fixed, split = sharded
    assert sum(bytes_per_parameter(point, is_expert=False, is_quantized=True)) == fixed + split / 64
    assert sum(bytes_per_parameter(point, is_expert=True, is_quantized=True)) == whole


def test_llama_405b_of_the_report() -> None:
    """Report section 1.1 prints 810 + 4860 + 1620 + 5575 = 12865: decimal GB, but GiB for the activations."""
    plan = Plan(
        model=load_model("llama3.1-405b"), hardware="h100", num_gpus=1, seq_len=8192, global_batch_size=1,
        stack="megatron-lm-2022",
    )  # fmt: skip
    by_category = memory_by_rank(plan.model, plan.point, load_stack("megatron-lm-2022"), load_profile("h100"))
    for category, printed in (("weights", 810), ("optimizer", 4860), ("gradients", 1620)):
        assert by_category[category][0] / 1e9 == pytest.approx(printed, rel=3e-3)  # type: ignore[index]  # 405.85e9
    layers_gib = sum(
        item.size_bytes / GIB
        for item in memory_items(plan.model, plan.point, load_stack("megatron-lm-2022"), 0)
        if item.category == "activations" and item.component != "head"
    )
    assert layers_gib == pytest.approx(5575.5, abs=0.05)


def published(name: str, num_layers: int, **fields: Any) -> Plan:
    """A run of the SimuMax B200 validation: some layers of a model, BF16, fp32 gradients and moments, alltoall."""
    model = load_model(name)
    model = type(model).model_validate(model.model_dump() | {"num_layers": num_layers})
    return Plan(model=model, hardware="b200", num_gpus=8, global_batch_size=32, **fields)


@pytest.mark.parametrize(
    "plan, allocated_gib",
    [
        (published("llama3-70b", 12, seq_len=4096, pp=2), 66.55),
        (published("llama3-70b", 12, seq_len=4096, tp=4), 39.07),
        (published("llama3-70b", 12, seq_len=131072, tp=2, cp=4), 112.67),
        (published("llama3.1-405b", 4, seq_len=4096, pp=2), 87.08),
        (published("llama3.1-405b", 4, seq_len=32768, cp=8), 139.22),
        (published("deepseek-v2-l4", 4, seq_len=4096, ep=8), 45.63),
        (published("deepseek-v3-l4", 4, seq_len=4096, ep=8), 104.30),
    ],
)  # fmt: skip
def test_published_peaks_on_b200(plan: Plan, allocated_gib: float) -> None:
    """Peak allocated memory that SimuMax measured (docs/b200 of its repository), within 2 %."""
    by_category = memory_by_rank(plan.model, plan.point, MEGATRON, load_profile("b200"))
    allocated = zip(*(by_category[category] for category in MEMORY_CATEGORIES[:-1]), strict=True)
    assert max(map(sum, allocated)) / GIB == pytest.approx(allocated_gib, rel=0.02)


def qwen_plan(**fields: Any) -> Plan:
    return Plan(
        model=load_model("qwen3-235b-a22b"), hardware="gb300", num_gpus=256, seq_len=4096, global_batch_size=8192,
        stack="megatron-bridge-26.08", **fields,
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 4, 16]),
    pp=st.sampled_from([1, 2, 4]),
    axis=st.sampled_from(["tp", "ep", "pp"]),
)
def test_splitting_more_never_raises_weights(tp: int, ep: int, pp: int, axis: str) -> None:
    fields = {"tp": tp, "ep": ep, "pp": pp}
    wide, narrow = qwen_plan(**fields), qwen_plan(**fields | {axis: 2 * fields[axis]})
    weights = [max(memory_by_rank(p.model, p.point, MEGATRON, GB300)["weights"]) for p in (wide, narrow)]
    assert weights[1] <= weights[0]


@settings(max_examples=40, deadline=None)
@given(
    mbs=st.sampled_from([1, 2]),
    pp=st.sampled_from([2, 4]),
    vp=st.sampled_from([1, 2]),
    module=st.sampled_from(["layernorm", "moe_act", "moe", "full"]),
)
def test_more_work_never_takes_less_and_recompute_never_keeps_more(mbs: int, pp: int, vp: int, module: str) -> None:
    def activations(**fields: Any) -> tuple[float, ...]:
        plan = qwen_plan(pp=pp, vp=vp, ep=16, **fields)
        return memory_by_rank(plan.model, plan.point, MEGATRON, GB300)["activations"]

    base = activations(mbs=mbs)
    assert activations(mbs=2 * mbs) == tuple(2 * size for size in base)
    assert all(less < more for less, more in zip(activations(mbs=mbs, recompute=[module]), base, strict=True))


def test_transients_count_beyond_the_logits_only(report_plan: Plan) -> None:
    """The last rank's logits (4.2 GiB with two heads) are freed before its layers run backward."""
    names = component_gib(report_plan, 3, "buffers")
    assert set(names) == {"weight_gradients"}
    middle = component_gib(report_plan, 2, "buffers")
    rows = 4096 * 8 * 7168 * 2 / GIB
    assert middle["dispatcher"] == 2 * rows
    full = component_gib(report_plan.replace(recompute=("full",), layout=report_plan.layout), 2, "buffers")
    assert full["recompute"] == (2236 - 56) / 1024


def test_kept_exchange_buffers_count_beside_the_logits(report_plan: Plan) -> None:
    plan = report_plan.replace(dispatcher="flex", layout=report_plan.layout)
    assert component_gib(plan, 3, "buffers")["dispatcher"] == 2 * 4096 * 8 * 7168 * 2 / GIB


def test_layout_moves_memory_between_ranks(report_plan: Plan) -> None:
    def static(layout: str, profile: HardwareProfile = GB300) -> tuple[float, ...]:
        point = replace(report_plan.point, layout=layout)
        return memory_by_rank(report_plan.model, point, MEGATRON, profile)["weights"]

    shifted = static("Et*3|(tttt|)*14ttmL")
    published_layout = static(balanced_layout(report_plan.model, 16).text)
    assert shifted[0] < published_layout[0]
    assert shifted[3] > published_layout[3]
