"""Whole steps: sums, bounds, monotone in work and bandwidth, shares that the report names."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.graph import FAMILY_INDEX
from moeplan.simulator.memory import memory_by_rank
from moeplan.simulator.predict import step_times
from moeplan.simulator.stack import SoftwareStack, load_stack
from moeplan.simulator.step_model import StepModel, step_model
from moeplan.vocabulary import OP_FAMILIES

STACK = load_stack("megatron-bridge-26.08")
# What the stack's recipes switch on, and partial graphs without overlap.
TUNED: dict[str, Any] = {"ep_overlap": True, "delay_wgrad": True, "cuda_graph": ("full_iteration",)}
EAGER: dict[str, Any] = {"cuda_graph": ("attn", "moe_router")}
GB200, H100 = load_profile("gb200"), load_profile("h100")
QWEN = load_model("qwen3-30b-a3b")
ROUNDING = 1e-12


@st.composite
def small_plans(draw: st.DrawFn) -> Plan:
    pp = draw(st.sampled_from([1, 2, 4]))
    return Plan(
        model=QWEN,
        hardware="gb200",
        num_gpus=32,
        seq_len=4096,
        global_batch_size=256,
        pp=pp,
        vp=draw(st.sampled_from([1, 2])) if pp > 1 else 1,
        tp=draw(st.sampled_from([1, 2, 4])),
        cp=draw(st.sampled_from([1, 2])),
        ep=draw(st.sampled_from([1, 4, 8])),
        precision=draw(st.sampled_from(["bf16", "mxfp8"])),
        dispatcher=draw(st.sampled_from(["alltoall", "flex"])),
        recompute=draw(st.sampled_from([(), ("moe_act",), ("full",)])),
    )


def step_s(plan: Plan, profile: HardwareProfile = GB200, stack: SoftwareStack = STACK) -> float:
    return StepModel(plan.model, stack, profile).step_times([plan.point])[0].step_s


@settings(max_examples=40)
@given(plan=small_plans(), graphed=st.booleans())
def test_exposed_seconds_add_up_and_the_step_is_bounded(plan: Plan, graphed: bool) -> None:
    plan = plan.replace(layout=plan.layout, **(EAGER if graphed else {}))
    time = StepModel(plan.model, STACK, GB200).step_times([plan.point])[0]
    assert time.exposed_s.sum() == pytest.approx(time.step_s)
    assert (time.exposed_s >= -1e-12).all()
    bubble = time.exposed_s[FAMILY_INDEX["bubble"]]
    busiest = (time.forward_s + time.backward_s).reshape(plan.vp, plan.pp).sum(axis=0).max() * plan.num_micro_batches
    one_after_another = (time.total_s.sum() - bubble) * plan.pp + 2 * plan.num_micro_batches * time.send_s * plan.pp
    assert busiest <= time.step_s <= one_after_another * (1 + 1e-9)


@settings(max_examples=25)
@given(plan=small_plans())
def test_more_tokens_never_take_less_time(plan: Plan) -> None:
    before = step_s(plan) * (1 - ROUNDING)
    assert step_s(plan.replace(seq_len=2 * plan.seq_len)) >= before
    assert step_s(plan.replace(global_batch_size=2 * plan.global_batch_size)) >= before


@settings(max_examples=25)
@given(plan=small_plans(), name=st.sampled_from(["hbm_bytes_per_s", "sustained_frac", "gather_efficiency_frac"]))
def test_a_slower_machine_never_takes_less_time(plan: Plan, name: str) -> None:
    number = getattr(GB200, name).model_copy(update={"low": None, "high": None})
    slow = GB200.model_copy(update={name: number.model_copy(update={"value": number.value / 2})})
    assert step_s(plan, slow) >= step_s(plan) * (1 - ROUNDING)


@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_blockwise"])
@pytest.mark.parametrize("ep", [1, 8])
def test_more_memory_on_the_same_processor_never_takes_more_time(precision: str, ep: int) -> None:
    """An H200 is an H100 with faster memory; 128 and 16 local experts on Megatron's stack."""
    size = {"num_gpus": 8, "seq_len": 4096, "global_batch_size": 64, "ep": ep, "mbs": 2}
    plan = Plan(model=QWEN, hardware="h100", stack=STACK.name, precision=precision, **size)
    assert step_s(plan, load_profile("h200")) <= step_s(plan, H100)


def test_recompute_costs_time_and_overlap_saves_it(report_plan: Plan) -> None:
    eager = report_plan.replace(dispatcher="flex", **EAGER)
    plain = step_s(eager.replace(**TUNED))
    assert step_s(eager.replace(**TUNED, recompute=("mla_up_proj",))) > plain
    assert step_s(eager) > plain
    apart = step_s(eager), step_s(eager.replace(recompute=("full",)))
    assert 1.2 < apart[1] / apart[0] < 1.45  # report section 1.6: a third of compute, and the exchanges again


def test_batched_points_are_those_one_by_one(report_plan: Plan) -> None:
    plans = [report_plan, report_plan.replace(precision="mxfp8"), report_plan.replace(pp=2, vp=8), report_plan]
    together = step_times(report_plan.model, [plan.point for plan in plans], STACK, GB200)
    for plan, time in zip(plans, together, strict=True):
        assert time.step_s == pytest.approx(step_s(plan), rel=1e-12)
    assert together[0].step_s == together[3].step_s


def test_same_objects_keep_their_costs() -> None:
    assert step_model(QWEN, STACK, GB200) is step_model(QWEN, STACK, GB200)
    assert step_model(QWEN, STACK, GB200) is not step_model(QWEN, STACK, H100)


def share(plan: Plan, profile: HardwareProfile, *families: str) -> float:
    """Part of the step that families expose, without overlap."""
    time = StepModel(plan.model, STACK, profile).step_times([plan.replace(**EAGER).point])[0]
    return float(sum(time.exposed_s[FAMILY_INDEX[family]] for family in families)) / time.step_s  # type: ignore[index]


def test_shares_of_the_report(report_plan: Plan) -> None:
    """Report sections 1.2 and 4.2.

    Exchange: about 20 % at EP64 inside NVL72, 40 to 60 % across H100 nodes, 30 to 40 % there with a dispatcher that
    sends one copy a node. GEMMs below half; routing and permutation about 9 %.
    """
    rack = report_plan.replace(precision="mxfp8")
    assert share(rack, GB200, "dispatch") == pytest.approx(0.20, abs=0.03)
    assert share(rack, GB200, "dense_gemm", "expert_gemm") < 0.5
    assert share(rack, GB200, "router", "permute") == pytest.approx(0.09, abs=0.03)
    nodes = report_plan.replace(num_gpus=1024, hardware="h100", pp=8, tp=2, precision="fp8_blockwise")
    assert 0.40 < share(nodes, H100, "dispatch") < 0.60
    deduplicated = nodes.replace(dispatcher="flex", flex_backend="hybridep")
    assert 0.30 < share(deduplicated, H100, "dispatch") < 0.40


def test_gemms_are_most_of_a_dense_step() -> None:
    """Report section 1.2: about 70 % of Llama 3 405B's."""
    degrees = {"tp": 8, "pp": 8, "vp": 7, "num_gpus": 512, "seq_len": 4096, "global_batch_size": 512}
    plan = Plan(model=load_model("llama3.1-405b"), hardware="h100", stack=STACK.name, precision="bf16", **degrees)
    assert share(plan, H100, "dense_gemm") == pytest.approx(0.70, abs=0.05)


def test_overlap_leaves_less_than_a_twentieth_of_the_step_exposed(report_plan: Plan) -> None:
    """Report section 4.2.3: EP64 over 8 H100 nodes with DeepEP, exchanges in the five-step schedule, < 5 % exposed.

    What hides is not free: compute beside it loses its SMs and more, so the step falls by less than the exchange does.
    """
    plan = report_plan.replace(
        num_gpus=1024, hardware="h100", pp=8, vp=4, tp=2, precision="fp8_blockwise", dispatcher="flex",
        flex_backend="deepep", cuda_graph=(), recompute=("mla_up_proj", "mlp"), fused_grouped_mlp=False,
    )  # fmt: skip
    off, on = (
        StepModel(plan.model, STACK, H100).step_times([plan.replace(ep_overlap=on, delay_wgrad=on).point])[0]
        for on in (False, True)
    )
    dispatch = FAMILY_INDEX["dispatch"]
    assert 0.30 < off.exposed_s[dispatch] / off.step_s < 0.40
    assert on.exposed_s[dispatch] / on.step_s < 0.05
    hidden = off.exposed_s[dispatch] - on.exposed_s[dispatch]
    assert 0.3 * hidden < off.step_s - on.step_s < hidden
    assert on.total_s[FAMILY_INDEX["expert_gemm"]] > off.total_s[FAMILY_INDEX["expert_gemm"]]


def test_gradient_reduction_hides_behind_the_last_backward() -> None:
    plan = Plan(model=QWEN, hardware="h100", num_gpus=64, seq_len=4096, global_batch_size=512, mbs=4, ep=8)
    exposed = plan.replace(overlap_grad_reduce=False, overlap_param_gather=False)
    times = step_times(QWEN, [plan.point, exposed.point], STACK, H100)
    dp = FAMILY_INDEX["dp_comm"]
    assert times[0].total_s[dp] == times[1].total_s[dp] == pytest.approx(times[1].exposed_s[dp])
    assert times[0].exposed_s[dp] < times[1].exposed_s[dp] / 4
    assert np.array(times[0].total_s).shape == (len(OP_FAMILIES),)


def test_gemms_are_seven_tenths_of_a_dense_step() -> None:
    """Report section 1.2, Llama 3 405B: the 1024 H100 recipe (TP8 PP8 VPP8 CP2, FP8, TP communication overlapped)."""
    plan = Plan(
        model=load_model("llama3.1-405b"), hardware="h100", num_gpus=1024, seq_len=8192, global_batch_size=512,
        tp=8, pp=8, vp=8, cp=2, precision="fp8_current", tp_comm_overlap=True,
    )  # fmt: skip
    time = StepModel(plan.model, STACK, H100).step_times([plan.point])[0]
    assert time.exposed_s[FAMILY_INDEX["dense_gemm"]] / time.step_s == pytest.approx(0.70, abs=0.05)


def test_frozen_weights_have_neither_gradients_nor_an_optimizer() -> None:
    plan = Plan(
        model=load_model("llama3-70b"), hardware="h100", num_gpus=32, seq_len=4096, global_batch_size=32,
        tp=2, pp=4, vp=20, grad_dtype="bf16",
    )  # fmt: skip
    trained, frozen = load_stack("megatron-bridge-26.06"), load_stack("megatron-bridge-lora-26.06")
    times = [StepModel(plan.model, stack, H100).step_times([plan.point])[0] for stack in (trained, frozen)]
    gemm = FAMILY_INDEX["dense_gemm"]
    # A third of the products, and the main gradients they are added to.
    assert 0.6 < times[1].total_s[gemm] / times[0].total_s[gemm] < 2 / 3
    assert times[1].total_s[FAMILY_INDEX["optimizer"]] == times[1].total_s[FAMILY_INDEX["dp_comm"]] == 0
    held = [memory_by_rank(plan.model, plan.point, stack, H100) for stack in (trained, frozen)]
    assert held[1]["weights"] == held[0]["weights"]
    assert set(held[1].get("gradients", (0.0,))) == set(held[1].get("optimizer", (0.0,))) == {0.0}
