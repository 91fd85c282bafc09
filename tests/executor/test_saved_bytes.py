"""Saved-tensor bytes of the executor equal the simulator's native stack, option by option."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

import moeplan.executor.offload as offload_module
from moeplan.mixers import GqaAttention, Mamba2, MlaAttention
from moeplan.model_spec import DENSE_LAYER, MOE_LAYER, ModelSpec, Moe, Router
from moeplan.plan import Plan
from moeplan.simulator.activations import ActivationKind, activation_bytes
from moeplan.simulator.layer_state import layer_bytes
from moeplan.simulator.stack import load_stack
from tests.executor.saved_bytes import layer_kept_bytes, model_kept_bytes

NATIVE = load_stack("native")
GQA = GqaAttention(num_heads=8, num_kv_heads=4, head_dim=32)
NORMED = GQA.model_copy(update={"qk_norm": True})
GATED = NORMED.model_copy(update={"output_gate": True, "rotary_dim": 16})
MLA = MlaAttention(
    num_heads=8, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
)
EVERYTHING = {
    "offload_modules": ("core_attn", "attn_proj", "attn_norm", "qkv_linear", "mlp_norm", "expert_fc1", "moe_act")
}
PACKED = {"packed_lengths": (64, 128, 64)}
DEEPSEEK = Router(score_function="sigmoid", num_groups=4, top_groups=2, scaling_factor=2.5, aux_loss="seq_aux_loss")


def small_model(attention: GqaAttention | MlaAttention = GQA, *, dense: bool = False, **fields: Any) -> ModelSpec:
    experts: dict[str, Any] = {"num_experts": 16, "top_k": 4, "expert_ffn_size": 128, "shared_ffn_size": 192}
    moe = None if dense else Moe(**(experts | fields.pop("moe", {})))
    return ModelSpec(
        name="small", num_layers=1, num_dense_layers=int(dense), hidden_size=256, vocab_size=256,
        attention=attention, dense_ffn_size=640, moe=moe, **fields,
    )  # fmt: skip


def small_plan(model: ModelSpec, **changes: Any) -> Plan:
    fields: dict[str, Any] = {"seq_len": 256, "num_gpus": 1, "mbs": 2, "precision": "bf16"} | changes
    batch = 2 * fields["num_gpus"] // (fields.get("tp", 1) * fields.get("cp", 1))
    return Plan(model=model, hardware="cpu", global_batch_size=batch, **fields)


def check(plan: Plan, *, cpu_bytes: float = 0) -> None:
    """``cpu_bytes``: what a kernel of CPUs keeps and those of GPUs do not."""
    expected = activation_bytes(plan.model, plan.model.layer_kinds[0], plan.point, NATIVE)
    assert layer_kept_bytes(plan) - cpu_bytes == pytest.approx(expected, rel=0.01)


@pytest.fixture(autouse=True)
def tiny_tensors_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "MIN_BYTES", 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        small_model(),
        small_model(NORMED),
        small_model(GATED),
        small_model(GQA.model_copy(update={"output_gate": True, "qkv_bias": True})),
        small_model(MLA),
        small_model(MLA.model_copy(update={"q_lora_rank": 0})),
        small_model(GQA.model_copy(update={"qkv_bias": True, "out_bias": True})),
        small_model(GQA.model_copy(update={"sliding_window": 64})),
        small_model(GQA.model_copy(update={"sliding_window": 64, "sinks": True})),
        small_model(GQA.model_copy(update={"sinks": True}), moe={"mlp_bias": True}),
        small_model(dense=True),
        small_model(MLA, dense=True),
        small_model(activation="gelu"),
        small_model(activation="geglu"),
        small_model(activation="squared_relu", dense=True),
        small_model(moe={"shared_gate": True}),
        small_model(moe={"shared_ffn_size": 0, "top_k": 1}),
        small_model(moe={"router": Router(aux_loss="aux_loss", aux_loss_coeff=0.1, z_loss_coeff=0.1)}),
        small_model(moe={"router": DEEPSEEK.model_copy(update={"aux_loss_coeff": 0.1})}),
    ],
)
def test_layers(model: ModelSpec, precision: str) -> None:
    check(small_plan(model, precision=precision))


RECOMPUTE: list[tuple[str, ...]] = [
    ("core_attn",), ("moe_act",), ("layernorm",), ("mlp",), ("moe",), ("shared_experts",), ("full",),
    ("core_attn", "layernorm", "moe_act", "shared_experts"), ("layernorm", "moe"), ("layernorm", "mlp"),
]  # fmt: skip


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("model", [small_model(), small_model(GATED), small_model(MLA), small_model(dense=True)])
def test_recompute(model: ModelSpec, recompute: tuple[str, ...]) -> None:
    check(small_plan(model, recompute=recompute))


@pytest.mark.parametrize("recompute", [("mla_up_proj",), ("core_attn", "mla_up_proj"), ("mla_up_proj", "mlp", "moe")])
@pytest.mark.parametrize("model", [small_model(MLA), small_model(MLA, dense=True)])
def test_recompute_of_latent_attention(model: ModelSpec, recompute: tuple[str, ...]) -> None:
    check(small_plan(model, recompute=recompute))


@pytest.mark.parametrize(
    "changes",
    [
        {"offload_modules": ("attn_norm",)},
        {"offload_modules": ("qkv_linear",)},
        {"offload_modules": ("core_attn",)},
        {"offload_modules": ("core_attn", "attn_proj")},
        {"offload_modules": ("mlp_norm",)},
        {"offload_modules": ("expert_fc1",)},
        {"offload_modules": ("moe_act",)},
        {"offload_modules": ("fused_group_mlp",)},
        EVERYTHING,
        EVERYTHING | {"recompute": ("core_attn", "layernorm", "moe_act", "shared_experts")},
        EVERYTHING | {"recompute": ("full",)},
        EVERYTHING | {"recompute": ("moe",)},
    ],
)
@pytest.mark.parametrize(
    "model", [small_model(), small_model(NORMED), small_model(GATED), small_model(MLA), small_model(dense=True)]
)
def test_offload(model: ModelSpec, changes: dict[str, Any]) -> None:
    check(small_plan(model, **changes))


def test_what_is_made_again_is_not_sent() -> None:
    check(small_plan(small_model(MLA), offload_modules=("core_attn",), recompute=("mla_up_proj",)))


@pytest.mark.parametrize("changes", [{}, {"recompute": ("moe_act",)}, {"offload_modules": ("moe_act",)}])
@pytest.mark.parametrize("model", [small_model(), small_model(MLA)])
def test_probabilities_after_the_experts(model: ModelSpec, changes: dict[str, Any]) -> None:
    check(small_plan(model, memory_efficient_permutation=False, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 2, "num_gpus": 2},
        {"tp": 4, "num_gpus": 4, "precision": "fp32"},
        {"tp": 2, "num_gpus": 2, "etp": 2},
        {"cp": 2, "num_gpus": 2},
        {"cp": 2, "num_gpus": 2, "offload_modules": ("core_attn", "attn_proj")},
        {"cp": 2, "num_gpus": 2, "cp_comm": "a2a"},
        {"cp": 2, "num_gpus": 2, "cp_comm": "a2a", "offload_modules": ("core_attn",)},
        {"cp": 4, "num_gpus": 4, "cp_comm": "a2a", "recompute": ("core_attn",)},
        {"tp": 2, "cp": 2, "num_gpus": 4, "recompute": ("layernorm", "moe_act")},
        {"cp": 4, "num_gpus": 4, "cp_comm": "a2a+p2p", "cp_a2a_size": 2},
        {"cp": 4, "num_gpus": 4, "cp_comm": "a2a+p2p", "cp_a2a_size": 2, "offload_modules": ("core_attn",)},
        {"cp": 2, "num_gpus": 2, **PACKED},
        {"cp": 2, "num_gpus": 2, "cp_comm": "a2a", **PACKED},
        {"tp": 2, "num_gpus": 2, **PACKED},
    ],
)
@pytest.mark.parametrize("model", [small_model(), small_model(MLA), small_model(dense=True)])
def test_ranks_that_split_a_layer(model: ModelSpec, changes: dict[str, Any]) -> None:
    if model.moe is None:
        changes = {key: value for key, value in changes.items() if key != "etp"}
    check(small_plan(model, **changes))


@pytest.mark.parametrize(
    "changes", [{}, {"recompute": ("core_attn",)}, {"offload_modules": ("core_attn",)}, EVERYTHING]
)
@pytest.mark.parametrize("model", [small_model(), small_model(NORMED), small_model(MLA), small_model(dense=True)])
def test_packed_documents(model: ModelSpec, changes: dict[str, Any]) -> None:
    check(small_plan(model, **PACKED, **changes))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("recompute", [(), ("moe_act",)])
def test_experts_padded_to_their_capacity(factor: float, recompute: tuple[str, ...]) -> None:
    plan = small_plan(small_model(moe={"router": Router(capacity_factor=factor)}), routing="drop", recompute=recompute)
    assert layer_kept_bytes(plan) == pytest.approx(layer_bytes(plan.model, MOE_LAYER, plan.point, NATIVE), rel=0.01)


@pytest.mark.parametrize("num_mtp_layers", [0, 2])
@pytest.mark.parametrize("recompute", [(), ("full",), ("layernorm", "moe_act")])
@pytest.mark.parametrize("attention", [GQA, MLA])
def test_whole_models(attention: GqaAttention | MlaAttention, recompute: tuple[str, ...], num_mtp_layers: int) -> None:
    fields = {"num_layers": 3, "num_dense_layers": 1, "num_mtp_layers": num_mtp_layers}
    plan = small_plan(small_model(attention).model_copy(update=fields), recompute=recompute)
    parts: dict[ActivationKind, int] = {DENSE_LAYER: 1, MOE_LAYER: 2, "mtp": num_mtp_layers, "loss": 1}
    expected = sum(num * activation_bytes(plan.model, kind, plan.point, NATIVE) for kind, num in parts.items() if num)
    assert model_kept_bytes(plan) == pytest.approx(expected, rel=0.01)


def small_hybrid(layer: str, *, state_size: int = 24, moe: Mapping[str, int] = MappingProxyType({})) -> ModelSpec:
    """One layer of one block, by the symbol of ``layer_pattern``."""
    mamba = Mamba2(num_heads=16, head_dim=32, state_size=state_size, num_groups=4, chunk_size=64)
    others: dict[str, Any] = {"linear_mixer": mamba if layer == "M" else None, "layer_pattern": layer}
    attention = GQA.model_copy(update={"rotary": False})
    return small_model(attention, moe={"latent_size": 96, **moe}, activation="squared_relu", **others)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp32"},
        {"recompute": ("layernorm",)},
        {"recompute": ("layernorm", "moe")},
        {"recompute": ("full",)},
        {"recompute": ("core_attn", "moe_act", "shared_experts", "mlp")},
        EVERYTHING,
        PACKED,
        {"tp": 4, "num_gpus": 4},
        {"cp": 2, "num_gpus": 2},
        {"tp": 2, "cp": 2, "num_gpus": 4, **PACKED},
    ],
)
@pytest.mark.parametrize("layer", ["M", "*", "-", "E"])
def test_layers_of_one_block(layer: str, changes: dict[str, Any]) -> None:
    check(small_plan(small_hybrid(layer), **changes))


def test_gathered_keys_are_not_kept() -> None:
    plan = small_plan(small_model(), cp=2, num_gpus=2, cp_comm="all_gather")
    # On a CPU attention between unequal lengths works by a mask: chunks of 64 queries, the second sees 256 keys.
    check(plan, cpu_bytes=64 * 256 * 2)
