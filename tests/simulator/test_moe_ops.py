"""Ops of the exchange by dispatcher, and how dropping at a capacity bounds the busiest rank."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import GroupedGemmCurve
from moeplan.model_spec import MOE_LAYER, ModelSpec, Moe
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.backward_ops import backward_ops
from moeplan.simulator.dispatch import busiest_rank, exchange_bytes, routed_load, routing_map_bytes
from moeplan.simulator.layer_ops import forward_ops
from moeplan.simulator.layer_state import expert_row_factor
from moeplan.simulator.op import Op
from moeplan.simulator.op_shapes import OpShape, Part
from moeplan.simulator.predict import predict
from moeplan.simulator.stack import load_stack

STACK, PROFILE = load_stack("native"), load_profile("h100")
QWEN = load_model("qwen3-30b-a3b")
FLEX: dict[str, Any] = {"dispatcher": "flex", "flex_backend": "torch"}


def plan_of(model: ModelSpec = QWEN, **changes: Any) -> Plan:
    fields = {"num_gpus": 16, "seq_len": 4096, "global_batch_size": 64, "ep": 16, "stack": "native"}
    return Plan(model=model, **({"hardware": "h100"} | fields | changes))


def moe_ops_of(plan: Plan) -> list[Op]:
    return forward_ops(plan.model, Part(MOE_LAYER), OpShape.of(plan.point, STACK, PROFILE), STACK)


def capped(**router: object) -> ModelSpec:
    assert QWEN.moe is not None
    changed = QWEN.moe.router.model_copy(update=router)
    return QWEN.model_copy(update={"moe": QWEN.moe.model_copy(update={"router": changed})})


def test_allgather_brings_every_token_to_every_rank() -> None:
    assert QWEN.moe is not None
    plan = plan_of(dispatcher="allgather", ep=4, etp=2)
    shape = OpShape.of(plan.point, STACK, PROFILE)
    forward = {op.name: op for op in moe_ops_of(plan)}
    backward = {op.name: op for op in backward_ops(list(forward.values()), shape, STACK.time)}
    hidden_bytes = 8 * plan.tokens_per_rank * 2 * QWEN.hidden_size
    dispatch, combine = forward["dispatch"], forward["combine"]
    assert (dispatch.kind, combine.kind) == ("all_gather", "reduce_scatter")
    assert dispatch.comm_bytes == hidden_bytes + 8 * plan.tokens_per_rank * 4 * QWEN.moe.top_k
    assert combine.comm_bytes == hidden_bytes
    assert backward["dispatch.dgrad"].kind == "reduce_scatter"
    assert (dispatch.group.num_ranks, dispatch.group.num_domains) == (8, 1)
    assert "permute" not in forward
    assert forward["local_permute"].hbm_bytes > 0


@pytest.mark.parametrize("ep,etp", [(16, 1), (8, 2), (1, 4)])
def test_flex_on_torch_sends_what_the_closed_form_says(ep: int, etp: int) -> None:
    plan = plan_of(ep=ep, etp=etp, **FLEX)
    shape = OpShape.of(plan.point, STACK, PROFILE)
    (dispatch,) = (op for op in moe_ops_of(plan) if op.name == "dispatch")
    assert QWEN.moe is not None
    token_bytes = 2 * QWEN.hidden_size
    sent = exchange_bytes(QWEN.moe, plan.tokens_per_rank, token_bytes, "torch", shape.ep_group, etp=etp)
    assert (dispatch.comm_bytes, dispatch.network_bytes) == (sent.scale_up, sent.network)
    assert dispatch.comm_bytes > 0
    names = [op.name for op in moe_ops_of(plan)]
    assert names.index("permute") < names.index("dispatch") < names.index("local_permute")


def dispatch_s(model: ModelSpec, **changes: Any) -> float:
    return predict(plan_of(model, **changes), PROFILE, STACK).time_s["dispatch"].total_s


def test_which_dispatcher_is_fastest_depends_on_experts_a_token() -> None:
    """On two hosts: eight copies of which half cross, against one that does; a single copy against all tokens."""
    assert QWEN.moe is not None
    one_each = QWEN.model_copy(update={"moe": QWEN.moe.model_copy(update={"top_k": 1})})
    assert dispatch_s(QWEN, **FLEX) < dispatch_s(QWEN)
    assert dispatch_s(QWEN, dispatcher="allgather") < dispatch_s(QWEN)
    assert dispatch_s(one_each) < dispatch_s(one_each, dispatcher="allgather")


# The largest of 8 normal variables lies 1.4236 deviations out: 1 + 0.1 x 16 / 4 x that of 16 experts a rank, E / K 16.
NATURAL = 1 + 0.4 * 1.4236


@pytest.mark.parametrize(
    "routing,router,expected",
    [
        ("balanced", {}, 1.0),
        ("natural", {}, NATURAL),
        ("drop", {"capacity_factor": 1.25}, 1.25),
        ("drop", {"capacity_factor": 2.0}, 2.0),
        ("drop", {"capacity_factor": 1.25, "pad_to_capacity": False}, 1.25),
        ("drop", {"capacity_factor": 2.0, "pad_to_capacity": False}, NATURAL),
        ("drop", {"capacity_factor": 0.5, "pad_to_capacity": False}, 0.5),
    ],
)
def test_a_capacity_bounds_the_busiest_rank(routing: Any, router: dict[str, object], expected: float) -> None:
    model = capped(**router)
    assert model.moe is not None
    assert routed_load(model.moe, routing, 0.1, 8) == pytest.approx(expected, rel=0.005)
    plan, even = plan_of(model, routing=routing), plan_of(model)
    factor = expert_row_factor(model, plan.point, STACK) / expert_row_factor(model, even.point, STACK)
    spread = STACK.time.choice_spread_frac.value
    assert factor == pytest.approx(routed_load(model.moe, routing, spread, plan.ep))
    busy, mean = ({op.name: op.flops for op in moe_ops_of(one)}["expert_fc1"] for one in (plan, even))
    assert busy / mean == pytest.approx(factor)


@pytest.mark.parametrize(
    "name, ep, low, high",
    [
        # Busiest ranks that published runs of natural routing ask for (docs/validation.md).
        ("qwen3-235b-a22b", 8, 1.5, 1.75),
        ("qwen3-30b-a3b", 16, 1.9, 2.2),
        # Experts under power-law routing, on each of 8 ranks (hardware facts, section 4.5): kernels 1.28 to 1.80.
        ("deepseek-v3", 8, 1.28, 2.0),
    ],
)
def test_busiest_ranks_of_natural_runs(name: str, ep: int, low: float, high: float) -> None:
    moe = load_model(name).moe
    assert moe is not None
    free = moe.model_copy(update={"router": moe.router.model_copy(update={"expert_bias": False})})
    assert low <= busiest_rank(free, STACK.time.choice_spread_frac.value, ep) <= high


@given(
    experts=st.sampled_from([8, 64, 256]),
    top_k=st.integers(1, 8),
    spread=st.floats(0, 5),
    ep=st.sampled_from([2, 4, 8]),
)
def test_no_rank_takes_more_than_its_experts_can(experts: int, top_k: int, spread: float, ep: int) -> None:
    moe = Moe(num_experts=experts, top_k=top_k, expert_ffn_size=64)
    load = busiest_rank(moe, spread, ep)
    assert 1 <= load <= ep * min(experts // ep, top_k) / top_k
    assert busiest_rank(moe, 2 * spread, ep) >= load


def test_one_rank_of_all_experts_is_never_busier_than_the_mean() -> None:
    plan, even = plan_of(QWEN, routing="natural", ep=1), plan_of(QWEN, ep=1)
    assert expert_row_factor(QWEN, plan.point, STACK) == expert_row_factor(QWEN, even.point, STACK)
    natural, balanced = ({op.name: op.flops for op in moe_ops_of(one)}["expert_fc1"] for one in (plan, even))
    assert natural == balanced


def test_biased_experts_keep_natural_routing_level_in_memory_too() -> None:
    model = capped(expert_bias=True)
    plan, even = plan_of(model, routing="natural"), plan_of(model)
    assert expert_row_factor(model, plan.point, STACK) == expert_row_factor(model, even.point, STACK)


def test_hybridep_gathers_where_all_tokens_go_before_a_dispatch_alone() -> None:
    """A byte for each token and expert: to the peers of other domains, and from there to all ranks of the own one."""
    bridge = load_stack("megatron-bridge-26.08")
    plan = plan_of(stack=bridge.name, dispatcher="flex", flex_backend="hybridep")
    shape = OpShape.of(plan.point, bridge, PROFILE)
    forward = {op.name: op for op in forward_ops(plan.model, Part(MOE_LAYER), shape, bridge)}
    backward = {op.name: op for op in backward_ops(list(forward.values()), shape, bridge.time)}
    each = 4096 * 128
    assert QWEN.moe is not None
    known = routing_map_bytes(QWEN.moe, 4096, "hybridep", shape.etp_ep_group)
    assert (known.scale_up, known.network) == (2 * 7 * each, each)
    assert forward["dispatch"].comm_bytes - forward["combine"].comm_bytes == pytest.approx(known.scale_up)
    assert forward["dispatch"].network_bytes - forward["combine"].network_bytes == pytest.approx(known.network)
    assert backward["dispatch.dgrad"].comm_bytes == pytest.approx(forward["combine"].comm_bytes)
    assert routing_map_bytes(QWEN.moe, 4096, "deepep", shape.etp_ep_group).scale_up == 0


def test_nvfp4_issues_two_more_kernels_an_expert() -> None:
    bridge, b200 = load_stack("megatron-bridge-26.08"), load_profile("b200")
    kernels = []
    for precision in ("mxfp8", "nvfp4"):
        plan = plan_of(hardware="b200", stack=bridge.name, precision=precision)
        ops = forward_ops(plan.model, Part(MOE_LAYER), OpShape.of(plan.point, bridge, b200), bridge)
        kernels.append(next(op.num_kernels for op in ops if op.name == "expert_fc1"))
    assert kernels[1] - kernels[0] == 2 * 128 / 16


def _moved(plan: Plan, names: tuple[str, ...]) -> list[float]:
    """GB that the ops of these names move forward and backward."""
    ops = [op for op in moe_ops_of(plan) if op.name in names]
    return [sum(op.hbm_bytes for op in ops) / 1e9, sum(op.backward_hbm_bytes for op in ops) / 1e9]


@pytest.mark.parametrize("dispatcher", [{}, {"dispatcher": "allgather"}, FLEX])
def test_copies_that_are_quantized_as_they_are_made_are_written_once(dispatcher: dict[str, Any]) -> None:
    alone = {"num_gpus": 1, "ep": 1, "global_batch_size": 1, **dispatcher}
    low, wide = plan_of(precision="fp8_current", **alone), plan_of(precision="bf16", **alone)
    copies, sums = ("permute", "local_permute"), ("unpermute", "local_unpermute")
    assert _moved(low, copies) == [0, _moved(wide, copies)[1]]
    assert _moved(low, sums) == [_moved(wide, sums)[0], 0]
    # Eight copies of 4096 tokens of 2048, a byte in each of two layouts, in whole tiles; tokens read twice.
    padded = low.tokens_per_rank * 8 * 2048 * 2 / 1e9
    assert _moved(low, ("expert.copies",))[0] == pytest.approx(padded + 2 * 2 * 4096 * 2048 / 1e9, rel=0.01)


@pytest.mark.parametrize(
    "model,changes",
    [("gpt-oss-20b", {}), ("qwen3-30b-a3b", {"ep": 2, "num_gpus": 2}), ("qwen3-30b-a3b", {"routing": "drop"})],
)
def test_copies_exist_in_bf16_where_they_travel_or_get_a_bias(model: str, changes: dict[str, Any]) -> None:
    fields = {"num_gpus": 1, "ep": 1, "global_batch_size": 2, "precision": "fp8_current"}
    plan = plan_of(load_model(model), **(fields | changes))
    assert _moved(plan, ("permute",))[0] > 0
    assert not _moved(plan, ("expert.copies",))[0]


def of_quack(flops_per_s: float) -> GroupedGemmCurve:
    return GroupedGemmCurve(
        dtype="bf16", backend="quack", num_experts=128, rows=(1024,), flops_per_s=(flops_per_s,), source="measured",
        ref="a test",
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes, backend",
    [
        ({}, "quack"),
        ({"cuda_graph": ("full_iteration",)}, "torch"),
        ({"num_gpus": 2, "ep": 2}, "torch"),
        ({"precision": "fp8_current", "bf16_first_layers": 1}, "torch"),
    ],
)
def test_experts_take_the_curves_of_kernels_that_their_plan_may_run(changes: dict[str, Any], backend: str) -> None:
    profile = PROFILE.model_copy(update={"grouped_gemm": (*PROFILE.grouped_gemm, of_quack(5e14))})
    alone: dict[str, Any] = {"num_gpus": 1, "ep": 1, "precision": "bf16"}
    plan = plan_of(**alone | changes)
    ops = forward_ops(plan.model, Part(MOE_LAYER), OpShape.of(plan.point, STACK, profile), STACK)
    assert {op.backend for op in ops if op.kind == "grouped_gemm"} == {backend}
    assert {op.backend for op in moe_ops_of(plan) if op.kind == "grouped_gemm"} == {"torch"}
