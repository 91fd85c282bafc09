"""A tiny model of each Hugging Face family, with every feature that the family has."""

from typing import Any

import torch
from torch import Tensor

from moeplan.mixers import GatedDeltaNet, GqaAttention, Mamba2, MlaAttention
from moeplan.model_spec import Llama3Scaling, ModelSpec, Moe, Router, YarnScaling

GQA = GqaAttention(num_heads=4, num_kv_heads=2, head_dim=8)
MLA = MlaAttention(num_heads=4, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
SOFTMAX = Moe(num_experts=8, top_k=2, expert_ffn_size=16)
SIGMOID = Router(score_function="sigmoid", scaling_factor=2.5, aux_loss="none", aux_loss_coeff=0, expert_bias=True)
# Short original lengths, so that the few positions of a test reach every part of the ramp.
YARN = YarnScaling(factor=4, original_max_positions=8, beta_fast=4, beta_slow=0.5)
LATENT_YARN = YARN.model_copy(update={"mscale": 0.7, "mscale_all_dim": 1.3})


def model(family: str, **changes: Any) -> ModelSpec:
    sizes = {"name": family, "num_layers": 2, "hidden_size": 32, "vocab_size": 256, "attention": GQA}
    return ModelSpec.model_validate(sizes | changes)


def grouped(router: Router, **changes: Any) -> Moe:
    groups = {"num_groups": 4, "top_groups": 2}
    return Moe(
        num_experts=8,
        top_k=2,
        expert_ffn_size=16,
        shared_ffn_size=16,
        router=router.model_copy(update=groups | changes),
    )


GATED_HYBRID: dict[str, Any] = {
    "num_layers": 3,
    "attention": GQA.model_copy(update={"qk_norm": True, "rotary_dim": 4, "output_gate": True}),
    "linear_mixer": GatedDeltaNet(num_k_heads=2, num_v_heads=4, k_head_dim=8, v_head_dim=16, conv_kernel=3),
    "attention_period": 3,
    # At 1e-6 the norm of heads whose query meets no key blows roundings of fp32 up, here as there.
    "norm_eps": 1e-2,
    "moe": SOFTMAX.model_copy(update={"shared_ffn_size": 24, "shared_gate": True}),
}
DEEP = {"attention": MLA, "dense_ffn_size": 48, "num_dense_layers": 1}
MODELS = [
    model("llama", dense_ffn_size=48, rope_scaling=Llama3Scaling(factor=4, original_max_positions=16)),
    model("llama", dense_ffn_size=48, attention=GQA.model_copy(update={"qkv_bias": True, "out_bias": True})),
    model("qwen2", dense_ffn_size=48, attention=GQA.model_copy(update={"qkv_bias": True}), tied_embeddings=True),
    model("qwen3", dense_ffn_size=48, attention=GQA.model_copy(update={"qk_norm": True}), rope_scaling=YARN),
    model("mixtral", moe=SOFTMAX, attention=GQA.model_copy(update={"sliding_window": 5})),
    model(
        "qwen3_moe",
        moe=SOFTMAX,
        attention=GQA.model_copy(update={"qk_norm": True}),
        dense_ffn_size=48,
        num_dense_layers=1,
    ),
    model(
        "qwen2_moe",
        moe=Moe(
            num_experts=8,
            top_k=2,
            expert_ffn_size=16,
            shared_ffn_size=24,
            shared_gate=True,
            router=Router(normalize_top_k=False),
        ),
        attention=GQA.model_copy(update={"qkv_bias": True}),
    ),
    model("qwen3_next", **GATED_HYBRID),
    model("qwen3_5_moe_text", **GATED_HYBRID, source="model_type qwen3_5_moe_text"),
    model(
        "deepseek_v2",
        **DEEP,
        moe=grouped(Router(normalize_top_k=False, scaling_factor=4), group_score_experts=1),
        rope_scaling=LATENT_YARN,
    ),
    model("deepseek_v3", **DEEP, moe=grouped(SIGMOID, group_score_experts=2), rope_scaling=LATENT_YARN),
    # Moonlight and Kimi K2: no groups, and here as there norms of other eps than those of latents.
    model(
        "deepseek_v3",
        **DEEP | {"attention": MLA.model_copy(update={"q_lora_rank": 0})},
        moe=grouped(SIGMOID, num_groups=1, top_groups=1),
        norm_eps=1e-2,
    ),
    model(
        "glm4_moe",
        **DEEP | {"attention": GQA.model_copy(update={"qk_norm": True, "qkv_bias": True, "rotary_dim": 4})},
        moe=grouped(SIGMOID, num_groups=1, top_groups=1),
    ),
    model(
        "gpt_oss",
        attention=GQA.model_copy(
            update={"qkv_bias": True, "out_bias": True, "sinks": True, "sliding_window": 5, "sliding_period": 2}
        ),
        moe=SOFTMAX.model_copy(update={"mlp_bias": True}),
        activation="clamped_swiglu",
        rope_scaling=YARN.model_copy(update={"truncate": False}),
    ),
    model(
        "nemotron_h",
        num_layers=6,
        layer_pattern="MEM*-E",
        attention=GQA.model_copy(update={"rotary": False}),
        linear_mixer=Mamba2(num_heads=8, head_dim=4, state_size=6, num_groups=2, chunk_size=5),
        dense_ffn_size=48,
        moe=Moe(
            num_experts=8,
            top_k=2,
            expert_ffn_size=16,
            shared_ffn_size=24,
            latent_size=12,
            router=SIGMOID.model_copy(update={"num_groups": 4, "top_groups": 2, "group_score_experts": 2}),
        ),
        activation="squared_relu",
        norm_eps=1e-5,
    ),
]


def of_family(family: str) -> ModelSpec:
    """The first model of that family."""
    return next(one for one in MODELS if one.name == family)


def spread(tensors: list[Tensor]) -> None:
    """Far from fresh values, at which all logits are about the same."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
