"""Kept tensors: the report's section 1.4 to the MiB, Korthikanti's formula item by item, and what never grows."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import InvalidInputError
from moeplan.model_spec import DENSE_LAYER, MOE_LAYER
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.activations import activation_bytes, kept_bytes, saved_tensors
from moeplan.simulator.stack import load_stack
from moeplan.vocabulary import RecomputeModule

MIB = 2**20
MEGATRON, CLASSIC = (load_stack(name) for name in ("megatron-bridge-26.08", "megatron-lm-2022"))

# Report section 1.4: MiB at 4096 tokens in BF16, and with FP8 inputs of linears.
REPORT_MIB = {
    "layer input": (56, 56),
    "input norm output": (56, 28),
    "query down-projection output": (12, 12),
    "query norm output": (12, 6),
    "compressed key-value": (4, 4),
    "key-value norm output": (4, 2),
    "query": (192, 192),
    "key": (192, 192),
    "value": (128, 128),
    "attention output": (128, 128),
    "softmax log-sum-exp": (2, 2),
    "input of the MLP block": (56, 56),
    "pre-MLP norm output": (56, 28),
    "router probabilities": (2, 2),
    "permutation row map": (8, 8),
    "shared FC1 output": (32, 16),
    "shared activation output": (16, 8),
    "expert FC1 input": (448, 224),
    "expert FC1 output": (256, 256),
    "expert activation output": (128, 128),
    "expert output kept for its probability": (448, 448),
}


def dsv3_bytes(report_plan: Plan, **changes: Any) -> float:
    return activation_bytes(report_plan.model, MOE_LAYER, replace(report_plan.point, **changes), MEGATRON)


@pytest.mark.parametrize("precision, column", [("bf16", 0), ("fp8_blockwise", 1), ("mxfp8", 1)])
def test_deepseek_v3_layer_tensor_by_tensor(report_plan: Plan, precision: str, column: int) -> None:
    point = replace(report_plan.point, precision=precision)  # type: ignore[arg-type]
    found = {
        tensor.name: tensor.size_bytes / MIB for tensor in saved_tensors(report_plan.model, MOE_LAYER, point, MEGATRON)
    }
    assert found == {name: figures[column] for name, figures in REPORT_MIB.items()}


@pytest.mark.parametrize(
    "changes, mib",
    [
        ({}, 2236),
        ({"memory_efficient_permutation": True}, 1788),
        ({"precision": "mxfp8"}, 1924),
        ({"precision": "mxfp8", "memory_efficient_permutation": True}, 1476),
        ({"recompute": ("full",)}, 56),
        ({"recompute": ("mla_up_proj",)}, 2236 - 512),  # 30.0 GiB over 60 layers in flight
        ({"recompute": ("moe_act",)}, 2236 - 128),
        ({"recompute": ("layernorm",)}, 2236 - 112),
        ({"recompute": ("shared_experts",)}, 2236 - 48),
        ({"recompute": ("core_attn",)}, 2236 - 2),
        ({"recompute": ("mlp",)}, 2236),  # of dense layers only
        ({"recompute": ("moe",)}, 898),  # attention's tensors and the block's input
        ({"recompute": ("layernorm", "moe")}, 898 - 112),
        ({"mbs": 2}, 2 * 2236),
        ({"tp": 2}, 2236 / 2),
        ({"cp": 4}, 2236 / 4),
        ({"etp": 2}, 2236 + 448),  # expert inputs are gathered over etp
    ],
)
def test_deepseek_v3_layer_sums(report_plan: Plan, changes: dict[str, object], mib: float) -> None:
    assert dsv3_bytes(report_plan, **changes) == mib * MIB


def test_quantized_tensors_bring_block_scales_on_top(report_plan: Plan) -> None:
    point = replace(report_plan.point, precision="mxfp8")
    assert kept_bytes(report_plan.model, MOE_LAYER, point, MEGATRON).scales_bytes == 312 * MIB / 32
    assert kept_bytes(report_plan.model, MOE_LAYER, report_plan.point, MEGATRON).scales_bytes == 0


def test_full_recompute_makes_the_whole_layer_again(report_plan: Plan) -> None:
    point = replace(report_plan.point, recompute=("full",))
    assert kept_bytes(report_plan.model, MOE_LAYER, point, MEGATRON).remade_bytes == (2236 - 56) * MIB


def test_dense_layer_and_mtp_depth(report_plan: Plan) -> None:
    model, point, hidden = report_plan.model, report_plan.point, 56
    dense = activation_bytes(model, DENSE_LAYER, point, MEGATRON) / MIB
    assert dense == 898 + 3 * 18432 * 4096 * 2 / MIB  # gate, up and activation output
    assert activation_bytes(model, "mtp", point, MEGATRON) / MIB == 2236 + 6 * hidden
    assert activation_bytes(model, "loss", point, MEGATRON) / MIB == 2 * hidden
    full = replace(point, recompute=("full",))
    assert activation_bytes(model, "mtp", full, MEGATRON) / MIB == 56 + 4 * hidden


def test_grouped_query_attention_rows() -> None:
    model = load_model("qwen3-235b-a22b")
    plan = Plan(model=model, hardware="h100", num_gpus=8, seq_len=4096, global_batch_size=8, ep=8)
    found = {t.name: t.size_bytes / 8192 for t in saved_tensors(model, MOE_LAYER, plan.point, MEGATRON)}
    assert found["query"] == found["query before its norm"] == found["attention output"] == 64 * 128
    assert found["key"] == found["key before its norm"] == found["value"] == 4 * 128
    assert found["softmax log-sum-exp"] == 2 * 64  # fp32
    assert "shared FC1 output" not in found
    assert "compressed key-value" not in found


def test_bias_of_the_second_matrix_defeats_memory_efficient_permutation(report_plan: Plan) -> None:
    model = load_model("gpt-oss-20b")
    plan = Plan(model=model, hardware="h100", num_gpus=8, seq_len=4096, global_batch_size=8, ep=8)
    names = {tensor.name for tensor in saved_tensors(model, MOE_LAYER, plan.point, MEGATRON)}
    assert plan.memory_efficient_permutation
    assert "expert output kept for its probability" in names


def llama_405b(seq_len: int) -> Plan:
    model = load_model("llama3.1-405b")
    return Plan(
        model=model, hardware="h100", num_gpus=1, seq_len=seq_len, global_batch_size=1, stack="megatron-lm-2022"
    )


def test_korthikanti_layer_item_by_item() -> None:
    plan = llama_405b(8192)
    unit = 8192 * 16384  # s b h
    scores = 128 * 8192**2  # a s^2 b
    by_component = dict.fromkeys(("attention", "dense_mlp", "norms"), 0.0)
    for tensor in saved_tensors(plan.model, DENSE_LAYER, plan.point, CLASSIC):
        by_component[tensor.component] += tensor.size_bytes
    assert by_component == {"attention": 11 * unit + 5 * scores, "dense_mlp": 19 * unit, "norms": 4 * unit}
    selective = replace(plan.point, recompute=("core_attn",))
    assert activation_bytes(plan.model, DENSE_LAYER, selective, CLASSIC) == 34 * unit


def test_llama_405b_activations_of_the_report() -> None:
    """Report section 1.1: 5986.6e9 bytes, which it prints as 5575 (GiB) beside decimal GB of the other items."""
    plan = llama_405b(8192)
    total = plan.model.num_layers * activation_bytes(plan.model, DENSE_LAYER, plan.point, CLASSIC)
    assert total / 1e9 == pytest.approx(5986.6, abs=0.05)
    assert total / 2**30 == pytest.approx(5575.5, abs=0.05)


def test_classic_stack_refuses_experts(report_plan: Plan) -> None:
    with pytest.raises(InvalidInputError, match="has no moe layer, deepseek-v3"):
        activation_bytes(report_plan.model, MOE_LAYER, report_plan.point, CLASSIC)


MODULES: list[RecomputeModule] = ["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


@given(modules=st.sets(st.sampled_from(MODULES)), extra=st.sampled_from(MODULES), mbs=st.integers(1, 8))
def test_recompute_never_adds_and_work_never_shrinks(
    report_plan: Plan, modules: set[RecomputeModule], extra: RecomputeModule, mbs: int
) -> None:
    def kept(recompute: set[RecomputeModule], mbs: int) -> float:
        return dsv3_bytes(report_plan, recompute=tuple(sorted(recompute)), mbs=mbs)

    assert dsv3_bytes(report_plan, recompute=("full",), mbs=mbs) <= kept(modules | {extra}, mbs) <= kept(modules, mbs)
    assert kept(modules, mbs) * 2 == kept(modules, 2 * mbs)


@pytest.mark.parametrize("precision, after_mib", [("bf16", 32), ("fp8_delayed", 16)])
def test_gated_attention_keeps_its_gate_and_its_output_before_and_after(
    report_plan: Plan, precision: str, after_mib: int
) -> None:
    point = replace(report_plan.point, precision=precision)  # type: ignore[arg-type]
    tensors = saved_tensors(load_model("qwen3-next-80b-a3b"), MOE_LAYER, point, MEGATRON)
    found = {tensor.name: tensor.size_bytes / MIB for tensor in tensors if "output" in tensor.name}
    # 16 heads of 256, 4096 tokens
    of_gate = {"attention output": 32, "gate of the output": 32, "attention output after its gate": after_mib}
    assert {name: found[name] for name in found if "attention" in name or "gate of" in name} == of_gate
