"""Ops of a whole model: their FLOPs are the model's, on any folding; backward and recompute add what they should."""

from collections import Counter
from dataclasses import replace

import pytest

from moeplan.flops import training_flops_per_token
from moeplan.hwprofiles.load import load_profile
from moeplan.layout import balanced_layout
from moeplan.model_spec import DENSE_LAYER, MOE_LAYER, ModelSpec
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.backward_ops import backward_ops
from moeplan.simulator.costs import cost
from moeplan.simulator.layer_ops import forward_ops
from moeplan.simulator.op import Op
from moeplan.simulator.op_shapes import OpShape, Part
from moeplan.simulator.stack import load_stack
from moeplan.simulator.step_model import StepModel

STACK = load_stack("megatron-bridge-26.08")
PROFILE = load_profile("gb300")


def plan_of(model: ModelSpec, **degrees: object) -> Plan:
    return Plan.model_validate(
        {
            "model": model,
            "hardware": "gb300",
            "num_gpus": 64,
            "seq_len": 4096,
            "global_batch_size": 512,
            "stack": STACK.name,
            **degrees,
        }
    )


def model_ops(plan: Plan) -> list[tuple[list[Op], int]]:
    """Forward ops of every part of a model with the number of such parts."""
    counts: Counter[Part] = Counter()
    for stage in StepModel(plan.model, STACK, PROFILE).stage_parts(plan.point):
        counts.update(stage)
    shape = OpShape.of(plan.point, STACK, PROFILE)
    return [(forward_ops(plan.model, part, shape, STACK), count) for part, count in counts.items()]


@pytest.mark.parametrize(
    "name, degrees",
    [
        ("deepseek-v3", {"ep": 64}),
        ("deepseek-v3", {"ep": 8, "tp": 4, "cp": 2, "pp": 2}),
        ("qwen3-235b-a22b", {"ep": 16, "tp": 4, "mbs": 2}),
        ("gpt-oss-120b", {"ep": 8}),
        ("llama3-8b", {"tp": 2}),
        ("mixtral-8x22b", {"ep": 4, "etp": 2, "tp": 2}),
    ],
)
def test_forward_flops_are_a_third_of_the_models(name: str, degrees: dict[str, int]) -> None:
    plan = plan_of(load_model(name), **degrees)
    shape = OpShape.of(plan.point, STACK, PROFILE)
    on_one_rank = sum(op.flops * count for ops, count in model_ops(plan) for op in ops if op.family != "router")
    # Latent down projections run on own tokens, whole: the same work. Norms are left out of GEMMs: below 1e-4.
    published = training_flops_per_token(plan.model, plan.seq_len) / 3 * shape.own_tokens
    assert on_one_rank == pytest.approx(published, rel=2e-4)


def test_backward_of_linears_is_twice_the_forward(report_plan: Plan) -> None:
    shape = OpShape.of(report_plan.point, STACK, PROFILE)
    forward = forward_ops(report_plan.model, Part(MOE_LAYER, 5), shape, STACK)
    backward = backward_ops(forward, shape, STACK.time)

    def gemm_flops(ops: list[Op]) -> float:
        return sum(op.flops for op in ops if op.kind in {"gemm", "grouped_gemm"})

    assert gemm_flops(backward) == 2 * gemm_flops(forward)
    assert {op.phase for op in backward} == {"dgrad", "wgrad"}


def test_attention_backward_has_five_gemms(report_plan: Plan) -> None:
    shape = OpShape.of(report_plan.point, STACK, PROFILE)
    forward = forward_ops(report_plan.model, Part(MOE_LAYER, 5), shape, STACK)
    core = next(op for op in forward if op.kind == "attention")
    back = next(op for op in backward_ops(forward, shape, STACK.time) if op.kind == "attention")
    assert back.flops / core.flops == pytest.approx((3 * 192 + 2 * 128) / (192 + 128))


def test_expert_rows_of_the_report(report_plan: Plan) -> None:
    """DeepSeek-V3 at EP64: each local expert sees T K EP / E = 8192 rows (report section 3.1)."""
    shape = OpShape.of(report_plan.point, STACK, PROFILE)
    fc1 = next(op for op in forward_ops(report_plan.model, Part(MOE_LAYER, 5), shape, STACK) if op.name == "expert_fc1")
    assert (fc1.rows, fc1.num_groups, fc1.cols, fc1.inner) == (8192, 4, 4096, 7168)


def test_rows_are_padded_to_the_precisions_alignment() -> None:
    model = load_model("qwen3-30b-a3b")
    plan = plan_of(model, ep=64, precision="mxfp8", seq_len=4100, global_batch_size=64)
    assert model.moe is not None
    rows = OpShape.of(plan.point, STACK, PROFILE).expert_rows(model.moe)
    assert rows == 16416  # 16400 tokens, up to a multiple of 32


@pytest.mark.parametrize(
    "module, names",
    [
        ("mla_up_proj", {"latent_norm", "q_up", "kv_up", "rope"}),
        ("moe_act", {"expert_act"}),
        ("layernorm", {"input_norm", "pre_mlp_norm"}),
        ("core_attn", {"attention_core"}),
        ("shared_experts", {"shared_fc1", "shared_act", "shared_fc2"}),
    ],
)
def test_recompute_runs_its_forward_again(report_plan: Plan, module: str, names: set[str]) -> None:
    plan = report_plan.replace(recompute=(module,))
    shape = OpShape.of(plan.point, STACK, PROFILE)
    ops = backward_ops(forward_ops(plan.model, Part(MOE_LAYER, 5), shape, STACK), shape, STACK.time)
    assert {op.name.removesuffix(".again") for op in ops if op.phase == "fwd"} == names


def test_full_recompute_repeats_the_exchange_but_not_the_head(report_plan: Plan) -> None:
    plan = report_plan.replace(recompute=("full",))
    shape = OpShape.of(plan.point, STACK, PROFILE)
    layer = backward_ops(forward_ops(plan.model, Part(MOE_LAYER, 5), shape, STACK), shape, STACK.time)
    loss = backward_ops(forward_ops(plan.model, Part("loss"), shape, STACK), shape, STACK.time)
    assert {"dispatch.again", "combine.again"} <= {op.name for op in layer}
    assert not [op for op in loss if op.phase == "fwd"]


def test_tensor_parallel_layers_gather_and_scatter_once_each_way() -> None:
    plan = plan_of(load_model("qwen3-8b"), tp=4)
    shape = OpShape.of(plan.point, STACK, PROFILE)
    forward = forward_ops(plan.model, Part(DENSE_LAYER), shape, STACK)
    moved = [(op.kind, op.comm_bytes) for op in forward if op.stream == "tp"]
    full = 4096 * 4096 * 2  # tokens x hidden x BF16
    assert moved == [("all_gather", full), ("reduce_scatter", full)] * 2
    kinds = [op.kind for op in backward_ops(forward, shape, STACK.time) if op.stream == "tp"]
    assert kinds == ["all_gather", "reduce_scatter"] * 2


def test_windowed_layers_see_fewer_keys() -> None:
    model = load_model("gpt-oss-120b")
    plan = plan_of(model, ep=8)
    shape = OpShape.of(plan.point, STACK, PROFILE)
    cores = {
        layer: next(op for op in forward_ops(model, Part(MOE_LAYER, layer), shape, STACK) if op.kind == "attention")
        for layer in (0, 1)
    }
    assert model.is_windowed(0)
    assert cores[0].flops < cores[1].flops / 10
    assert cores[0].seq_len == pytest.approx(2 * 128 * (1 - 128 / 8192))


@pytest.mark.parametrize("hardware, slower", [("h200", 1 / 0.58), ("b200", 1.0)])
def test_older_attention_kernels_run_before_blackwell_alone(hardware: str, slower: float) -> None:
    """FlashAttention 2 over cuDNN on one H200: 321 of 548 TFLOP/s forward, 250 of 453 backward."""
    model, profile, titan = load_model("qwen3-8b"), load_profile(hardware), load_stack("torchtitan-2024.12")
    plan = plan_of(model)
    for phase in (0, 1):
        seconds = []
        for stack in (STACK, titan):
            shape = OpShape.of(plan.point, stack, profile)
            ops = forward_ops(model, Part(DENSE_LAYER), shape, stack)
            ops = backward_ops(ops, shape, stack.time) if phase else ops
            seconds.append(next(cost(op, profile).seconds for op in ops if op.kind == "attention"))
        assert seconds[1] / seconds[0] == pytest.approx(slower)


def test_every_layout_symbol_becomes_a_part() -> None:
    model = load_model("deepseek-v3")
    point = replace(plan_of(model).point, layout=balanced_layout(model, 16).text)
    counts: Counter[str] = Counter()
    for stage in StepModel(model, STACK, PROFILE).stage_parts(point):
        for part, count in stage.items():
            counts[part.label] += count
    assert counts == {"embedding": 1, "dense": 3, "moe": 59, "mtp": 1, "loss": 2}


def test_the_heads_of_mtp_depths_run_where_the_loss_is() -> None:
    """Report section 8: an MTP depth costs a layer and a head; Megatron scores all depths in the last stage."""
    model = load_model("deepseek-v3")
    point = replace(plan_of(model).point, layout="Et*3|(tt|)*29m|L")
    *_, mtp, last = StepModel(model, STACK, PROFILE).stage_parts(point)
    assert {part.label: count for part, count in mtp.items()} == {"mtp": 1, "moe": 1}
    assert last == {Part("loss"): 2}


@pytest.mark.parametrize(
    "dispatcher, fused, kernels", [("alltoall", False, 72), ("alltoall", True, 31), ("flex", True, 17)]
)
def test_router_and_preprocess_have_the_kernels_of_the_report(
    report_plan: Plan, dispatcher: str, fused: bool, kernels: int
) -> None:
    """Report section 3.3: 72, 31 with the fused router, 17 where the flex dispatcher does the preprocess."""
    plan = report_plan.replace(dispatcher=dispatcher, router_fusion=fused)
    ops = forward_ops(plan.model, Part(MOE_LAYER, 5), OpShape.of(plan.point, STACK, PROFILE), STACK)
    assert next(op for op in ops if op.name == "router").num_kernels == kernels


def test_shared_expert_runs_beside_the_exchanges_where_asked(report_plan: Plan) -> None:
    """Report section 2.6: its first part waits for the router alone, its second for its own activation."""
    plan = report_plan.replace(shared_expert_overlap=True)
    ops = forward_ops(plan.model, Part(MOE_LAYER, 5), OpShape.of(plan.point, STACK, PROFILE), STACK)
    by_name = {op.name: op for op in ops}
    names = list(by_name)
    assert by_name["shared_fc1"].after == ("router",)
    assert by_name["shared_fc2"].after == ("shared_act",)
    assert names.index("shared_fc1") < names.index("dispatch") < names.index("shared_fc2") < names.index("combine")
    assert by_name["moe_residual"].after == ("unpermute", "shared_fc2")
    apart = forward_ops(report_plan.model, Part(MOE_LAYER, 5), OpShape.of(report_plan.point, STACK, PROFILE), STACK)
    assert sorted(names) == sorted(op.name for op in apart)


def test_mtp_projection_is_split_over_tp_or_whole_on_every_rank() -> None:
    """Megatron's linear of an MTP depth takes every token of the group and gathers its columns; ours is whole."""
    model, native = load_model("deepseek-v3"), load_stack("native")
    shape = OpShape.of(plan_of(model, tp=4, ep=8).point, STACK, PROFILE)
    split, whole = (forward_ops(model, Part("mtp"), shape, stack) for stack in (STACK, native))
    projection = {
        name: next(op for op in ops if op.kind == "gemm") for name, ops in (("split", split), ("whole", whole))
    }
    assert projection["split"].flops == projection["whole"].flops
    assert (projection["split"].cols, projection["whole"].cols) == (7168 / 4, 7168)
    full = 4096 * 7168 * 2  # tokens x hidden x BF16
    assert [op.comm_bytes for op in split if op.stream == "tp"] == [2 * full, full]
    assert not [op for op in whole if op.stream == "tp"]
