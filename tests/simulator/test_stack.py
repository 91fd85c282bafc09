"""Stacks: every preset loads, and says what it cannot execute."""

from dataclasses import replace
from pathlib import Path

import pytest

from moeplan.errors import InvalidInputError
from moeplan.files import toml_text
from moeplan.hwprofiles.load import load_profile
from moeplan.model_spec import MOE_LAYER
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.layer_ops import forward_ops
from moeplan.simulator.op_shapes import OpShape, Part
from moeplan.simulator.stack import load_stack, stack_names

DSV3 = Plan(
    model=load_model("deepseek-v3"), hardware="gb300", num_gpus=256, seq_len=4096, global_batch_size=8192, pp=4, ep=64
)


@pytest.mark.parametrize("name", stack_names())
def test_every_stack_loads_under_its_own_name_and_round_trips(name: str, tmp_path: Path) -> None:
    stack = load_stack(name)
    assert stack.name == name
    copy = tmp_path / "mine.toml"
    copy.write_text(toml_text(stack))
    assert load_stack(str(copy)) == stack


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(InvalidInputError, match="unknown stack 'megatron-bridge'") as caught:
        load_stack("megatron-bridge")
    assert "megatron-bridge-26.08" in caught.value.hint


def test_number_without_source_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bare.toml"
    text = toml_text(load_stack("native").model_copy(update={"name": "bare"}))
    path.write_text("allocator_reserve_frac = 0.1\n" + text.split("[allocator_reserve_frac]")[0])
    with pytest.raises(InvalidInputError, match=r"allocator_reserve_frac: a bare number has no source"):
        load_stack(str(path))


@pytest.mark.parametrize(
    "name, changes, keys",
    [
        ("megatron-bridge-26.08", {}, []),
        ("megatron-bridge-26.08", {"precision": "fp64"}, ["precision"]),
        ("megatron-bridge-26.08", {"dispatcher": "flex", "flex_backend": "hybridep"}, []),
        ("native", {"cp": 2, "vp": 2}, []),
        ("native", {"pp": 1, "dispatcher": "flex"}, []),
        ("native", {"num_gpus": 1, "cuda_graph": ("full_iteration",)}, []),
        ("native", {"num_gpus": 2, "cuda_graph": ("attn", "full_iteration")}, ["cuda_graph", "cuda_graph"]),
        ("native", {"num_gpus": 1, "cuda_graph": ("full_iteration",), "offload_layers": 1}, ["cuda_graph"]),
        ("megatron-bridge-26.08", {"dispatcher": "allgather"}, ["dispatcher"]),
        ("megatron-lm-2022", {"recompute": ("moe_act",)}, ["recompute", "model"]),
        ("megatron-lm-2022", {"cp": 2}, ["cp", "model"]),
    ],
)
def test_violations_name_what_the_stack_does_not_execute(
    name: str, changes: dict[str, object], keys: list[str]
) -> None:
    point = replace(DSV3.point, **changes)  # type: ignore[arg-type]
    found = list(load_stack(name).violations(DSV3.model, point))
    assert [key for key, _ in found] == keys
    assert all(name in problem for _, problem in found)


def test_a_stack_may_inherit_and_change_one_constant(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "megatron-bridge-26.08"\n[time]\nlaunches_per_op = { value = 9, source = "measured", ref = "a test" }\n'
    )
    mine, base = load_stack(str(path)), load_stack("megatron-bridge-26.08")
    assert (mine.name, mine.time.launches_per_op.value) == ("mine", 9)
    assert mine.time.router_kernels == base.time.router_kernels
    assert mine.precisions == base.precisions
    path.write_text(f'base = "{path}"\n')
    with pytest.raises(InvalidInputError, match="leads back"):
        load_stack(str(path))


def test_defaults_depend_on_machine_and_model() -> None:
    older, newer = load_stack("megatron-bridge-26.04"), load_stack("megatron-bridge-26.08")
    rack, node = load_profile("gb300"), load_profile("h100")
    assert older.features_of(DSV3.model, rack, "mxfp8", "hybridep").cuda_graph == (
        "attn",
        "moe_router",
        "moe_preprocess",
    )
    assert older.features_of(DSV3.model, node, "bf16", None).backend == "hybridep"
    assert newer.features_of(DSV3.model, rack, "mxfp8", "hybridep").cuda_graph == ("full_iteration",)
    assert newer.features_of(DSV3.model, rack, "mxfp8", "alltoall").cuda_graph is None
    assert newer.features_of(load_model("gpt-oss-120b"), rack, "bf16", "hybridep").permute_fusion is False


def test_a_stack_may_differ_on_a_cpu() -> None:
    native = load_stack("native")
    there = native.on("cpu")
    assert native.on("cuda") is native
    assert there.on("cpu") is there
    assert (native.graph_scopes, there.graph_scopes) == (("full_iteration",), ())
    assert (native.time.fused_grad_accumulation, there.time.fused_grad_accumulation) == (True, False)
    assert there.time.loss_bytes_per_logit.value > native.time.loss_bytes_per_logit.value
    assert there.time.gemm_frac == native.time.gemm_frac
    bare = native.model_copy(update={"on_cpu": {"time": {"gemm_frac": 2}}})
    with pytest.raises(InvalidInputError, match=r"stack native: on_cpu: time\.gemm_frac"):
        bare.on("cpu")


def test_without_grouped_gemm_is_one_kernel_an_expert() -> None:
    plan = Plan(model=load_model("qwen3-30b-a3b"), hardware="h100", num_gpus=8, ep=8, seq_len=4096, global_batch_size=8)
    stack = load_stack("native")
    shape = OpShape.of(plan.point, stack, load_profile("h100"))
    ops = {}
    for name, one in (("grouped", stack), ("single", stack.without_grouped_gemm())):
        ops[name] = {op.name: op for op in forward_ops(plan.model, Part(MOE_LAYER), shape, one)}
    grouped, single = ops["grouped"]["expert_fc1"], ops["single"]["expert_fc1"]
    assert (grouped.kind, grouped.num_kernels) == ("grouped_gemm", 1)
    assert (single.kind, single.num_kernels, single.num_groups) == ("gemm", 16, 16)
    assert (single.flops, single.hbm_bytes) == (grouped.flops, grouped.hbm_bytes)
    assert ops["single"]["expert_act"].num_kernels == 16


def test_deepep_between_hosts_needs_eight_peers_in_each() -> None:
    plan = Plan(
        model=load_model("qwen3-30b-a3b"), hardware="h100", num_gpus=16, ep=16, seq_len=4096, global_batch_size=16,
        dispatcher="flex", flex_backend="deepep",
    )  # fmt: skip
    stack, whole = load_stack("megatron-bridge-26.08"), load_profile("h100")
    four = whole.scale_up_domain_gpus.model_copy(update={"value": 4})
    small = whole.model_copy(update={"scale_up_domain_gpus": four})
    assert not list(stack.failures(plan.model, plan.point, whole))
    ((key, problem),) = stack.failures(plan.model, plan.point, small)
    assert (key, "needs 8 GPUs in an NVLink domain" in problem) == ("dispatcher", True)
    inside = plan.replace(ep=4)
    assert not list(stack.failures(inside.model, inside.point, small))
