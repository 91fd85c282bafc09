"""What kernels of linear mixers move, by hand; how it enters the ops of a layer; layers that stay in bf16."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import HardwareProfile, Sourced
from moeplan.mixers import GatedDeltaNet, Mamba2
from moeplan.model_spec import LayerKind, ModelSpec
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.activations import kept_bytes
from moeplan.simulator.backward_ops import backward_ops
from moeplan.simulator.costs import cost
from moeplan.simulator.host import GRAPHED, issued_seconds
from moeplan.simulator.layer_ops import forward_ops
from moeplan.simulator.op import Op
from moeplan.simulator.op_shapes import OpShape, Part
from moeplan.simulator.placement import rank_parameters
from moeplan.simulator.scan_traffic import scan_traffic
from moeplan.simulator.stack import load_stack
from moeplan.simulator.step_model import StepModel

STACK = load_stack("megatron-bridge-26.08")
PROFILE = load_profile("gb300")
MAMBA = LayerKind("linear", "none")


def plan_of(name: str, **changes: object) -> Plan:
    fields = {"model": load_model(name), "hardware": "gb300", "stack": STACK.name, "num_gpus": 64, "seq_len": 8192}
    return Plan.model_validate(fields | {"global_batch_size": 512, "ep": 64} | changes)


def linear_ops(plan: Plan) -> tuple[dict[str, Op], dict[str, Op]]:
    """Forward and backward ops of a layer of the linear mixer alone, by name."""
    shape = OpShape.of(plan.point, STACK, PROFILE)
    ops = forward_ops(plan.model, Part(MAMBA), shape, STACK)
    backward = backward_ops(ops, shape, STACK.time)
    return {op.name: op for op in ops}, {op.name.removesuffix(".dgrad"): op for op in backward}


def test_mamba_moves_what_its_kernels_read_and_write() -> None:
    """Two heads of 4, one group of 8 states, chunks of 2: I 8, n 8, s 8 x 8 / 2 = 32 and p 2 elements a token."""
    mixer = Mamba2(num_heads=2, head_dim=4, state_size=8, chunk_size=2)
    conv, scan, norm = scan_traffic(mixer, 2.0, 1)
    assert scan.forward_bytes == 2 * (5 * 8 + 4 * 8 + 4 * 32) + 4 * (2 * 32 + 2 * 2)
    assert scan.backward_bytes == 2 * (18 * 8 + 13 * 8 + 8 * 32) + 4 * (6.5 * 32 + 6 * 2)
    assert (conv.forward_bytes, conv.backward_bytes) == (2 * 2 * 24, 2 * 5 * 24)
    assert (norm.forward_bytes, norm.backward_bytes) == (2 * 2 * 8, 2 * 3 * 8)
    in_order = scan_traffic(mixer, 2.0, 2).conv  # the projection's 34 columns and the output are copied
    assert in_order.forward_bytes - conv.forward_bytes == 2 * 2 * (34 + 8)


def test_the_delta_rule_moves_what_its_kernels_read_and_write() -> None:
    """One key head of 4 and two value heads of 2, chunks of 2: narrow 4, keys 8, values 4, states 8, products 4."""
    mixer = GatedDeltaNet(num_k_heads=1, num_v_heads=2, k_head_dim=4, v_head_dim=2, chunk_size=2)
    scan = scan_traffic(mixer, 2.0, 1).scan
    assert scan.forward_bytes == 2 * (6 * 4 + 9 * 8 + 6 * 4 + 2 * 8 + 2 * 4) + 4 * 2 * 4
    assert scan.backward_bytes == 2 * (8 * 4 + 21 * 8 + 15 * 4 + 4 * 8 + 2 * 4)


def test_a_scan_is_no_faster_where_memory_is() -> None:
    forward, backward = linear_ops(plan_of("nemotron3-nano-30b-a3b", ep=8))
    most = STACK.time.scan_bytes_per_s
    assert most is not None
    for ops in (forward, backward):
        scan = ops["recurrence"]
        assert cost(scan, PROFILE).seconds == pytest.approx(scan.hbm_bytes / most.value)
        assert cost(scan, wider(PROFILE)).seconds == cost(scan, PROFILE).seconds
        assert cost(replace(scan, most_bytes_per_s=0.0), wider(PROFILE)).seconds < cost(scan, PROFILE).seconds
    assert (forward["recurrence"].num_kernels, backward["recurrence"].num_kernels) == (5, 15)


def test_the_native_stack_runs_scans_again_before_backward() -> None:
    plan = plan_of("nemotron3-nano-30b-a3b", ep=8)
    for stack, expected in ((STACK, []), (load_stack("native"), ["linear_conv", "recurrence", "linear_gated_norm"])):
        shape = OpShape.of(plan.point, stack, PROFILE)
        backward = backward_ops(forward_ops(plan.model, Part(MAMBA), shape, stack), shape, stack.time)
        assert [op.name.removesuffix(".again") for op in backward if op.name.endswith(".again")] == expected


def test_heads_are_exchanged_among_all_ranks_of_cp() -> None:
    for cp_comm in ({"cp_comm": "p2p"}, {"cp_comm": "a2a+p2p", "cp_a2a_size": 2}):
        forward, backward = linear_ops(plan_of("nemotron3-nano-30b-a3b", ep=8, cp=4, **cp_comm))
        for name in ("cp_split_heads", "cp_join_heads"):
            assert forward[name].group.num_ranks == backward[name].group.num_ranks == 4


def wider(profile: HardwareProfile) -> HardwareProfile:
    doubled = profile.hbm_bytes_per_s.model_copy(update={"value": 2 * profile.hbm_bytes_per_s.value})
    return profile.model_copy(update={"hbm_bytes_per_s": doubled})


def test_graphs_of_mamba_hold_its_layers_and_nothing_else() -> None:
    plan = plan_of("nemotron3-nano-30b-a3b", ep=8, cuda_graph=("mamba",))
    forward, _ = linear_ops(plan)
    assert {op.scope for op in forward.values()} == set(GRAPHED["mamba"])
    assert issued_seconds(forward.values(), PROFILE, STACK.time, plan.cuda_graph) == 0
    assert issued_seconds(forward.values(), PROFILE, STACK.time, ("attn",)) > 0
    delta, _ = linear_ops(plan_of("qwen3-next-80b-a3b", hardware="h100", ep=8))
    assert {op.scope for op in delta.values()} == set(GRAPHED["attn"])
    with pytest.raises(ValueError, match="mamba holds Mamba-2 layers, qwen3-next"):
        plan_of("qwen3-next-80b-a3b", cuda_graph=("mamba",))


def test_what_stays_in_bf16_runs_and_keeps_so() -> None:
    fields = {
        "precision": "nvfp4",
        "bf16_last_layers": 14,
        "bf16_modules": ("attention", "latent", "linear_out", "mtp"),
    }
    plan = plan_of("nemotron3-super-120b-a12b", **fields)
    model = StepModel(plan.model, STACK, PROFILE)
    (parts,) = model.stage_parts(plan.point)
    in_bf16 = sum(count for part, count in parts.items() if part.layer_kind is not None and part.layer_kind.is_bf16)
    assert in_bf16 == 14 + 2
    shape = OpShape.of(plan.point, STACK, PROFILE)

    def dtypes(kind: LayerKind) -> dict[str, str]:
        ops = model.part_time(Part(kind), shape).forward.runs
        return {run.op.name: run.op.dtype for run in ops if run.op.kind in ("gemm", "grouped_gemm")}

    assert dtypes(MAMBA) == {"linear_in": "nvfp4", "linear_out": "mxfp8"}
    assert dtypes(LayerKind("attention", "none")) == {"qkv_proj": "bf16", "out_proj": "bf16"}
    experts = dtypes(LayerKind("none", "moe"))
    assert (experts["latent_down"], experts["expert_fc1"], experts["shared_fc1"]) == ("bf16", "nvfp4", "nvfp4")
    assert set(dtypes(LayerKind("none", "moe", is_bf16=True)).values()) == {"bf16"}
    wide = kept_bytes(plan.model, MAMBA._replace(is_bf16=True), plan.point, STACK)
    assert wide == kept_bytes(plan.model, MAMBA, replace(plan.point, precision="bf16"), STACK)
    assert wide.kept_bytes > kept_bytes(plan.model, MAMBA, plan.point, STACK).kept_bytes


def test_two_depths_with_shared_weights_weigh_one() -> None:
    model = load_model("nemotron3-super-120b-a12b")
    one = model.model_copy(update={"num_mtp_layers": 1})
    plans = [plan_of(model.name, model=spec.model_dump()) for spec in (model, one)]
    held = [rank_parameters(plan.model, plan.layout, 1, tp=1, etp=1, ep=64) for plan in plans]
    assert held[0] == held[1]


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4), st.integers(0, 4))
def test_heads_are_split_only_where_they_divide(heads: int, groups: int, tp: int, cp: int) -> None:
    mixer = Mamba2(num_heads=2 ** max(heads, groups), head_dim=4, state_size=4, num_groups=2**groups)
    assert mixer.splits_over(2**tp, 2**cp) == (tp <= groups and tp + cp <= max(heads, groups))


def test_dynamic_cp_is_refused_where_the_longest_documents_take_too_many_ranks() -> None:
    lengths = {"document_lengths": (8192,) * 64, "dynamic_cp": True, "global_batch_size": 64, "cp": 1}
    with pytest.raises(ValueError, match="linear_mixer do not divide over tp 1 x packs of up to 64 ranks"):
        plan_of("qwen3-next-80b-a3b", **lengths)
    assert plan_of("qwen3-next-80b-a3b", num_gpus=16, ep=16, **lengths).dynamic_cp


def test_recipes_name_what_stays_in_bf16() -> None:
    model: ModelSpec = load_model("nemotron3-super-120b-a12b")
    found = STACK.features_of(model, PROFILE, "nvfp4", "hybridep")
    assert (found.bf16_last_layers, found.bf16_modules) == (14, ("attention", "latent", "linear_out", "mtp"))
    assert STACK.features_of(model, PROFILE, "mxfp8", "hybridep").bf16_modules == ("mtp",)
    assert STACK.features_of(model, PROFILE, "bf16", "hybridep").bf16_modules is None
    assert isinstance(STACK.time.scan_bytes_per_s, Sourced)
