"""Families of Hugging Face configs: each function gives the fields of ModelSpec that its family decides.

Defaults are those of the family's class in transformers; where a class has none that fits, the key is required.
"""

from collections.abc import Sequence
from typing import Any

from moeplan import hf_qwen3_next
from moeplan.errors import InvalidInputError
from moeplan.hf_rope import rotary_factor
from moeplan.hf_values import HfValues


def _gqa(values: HfValues, num_kv_heads: int | None = None, **features: Any) -> dict[str, Any]:
    """Grouped-query attention; ``head_dim`` defaults to an even split of the hidden size, ``features`` come on top."""
    heads = values.integer("num_attention_heads")
    hidden = values.integer("hidden_size")
    if "head_dim" not in values and hidden % heads:
        raise InvalidInputError(
            f"{values.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
            "correct one of them or add head_dim",
        )
    return {
        "kind": "gqa",
        "num_heads": heads,
        "num_kv_heads": values.integer("num_key_value_heads", num_kv_heads),
        "head_dim": values.integer("head_dim", hidden // heads),
        **features,
    }


def _window(values: HfValues, default: Sequence[bool], default_key: str = "sliding_window") -> dict[str, Any]:
    """Sliding-window fields from ``layer_types``, or from ``default`` (what ``default_key`` says) where there is none.

    Raises InvalidInputError unless the windowed layers are every n-th one, the first included.
    """
    layers = values.integer("num_hidden_layers")
    windowed, key = list(default), default_key
    if "layer_types" in values:
        types, key = values.layer_types("sliding_attention", "full_attention"), "layer_types"
        windowed = [kind == "sliding_attention" for kind in types]
    if not any(windowed):
        return {}
    period = next((n for n in range(1, layers + 1) if windowed == [i % n == 0 for i in range(layers)]), None)
    if period is None:
        values.refuse(key, "windows other layers than every n-th, the first included")
    return {"sliding_window": values.integer("sliding_window"), "sliding_period": period}


def _qwen_window(values: HfValues) -> dict[str, Any]:
    """Qwen windows its layers from ``max_window_layers`` on, and only where ``use_sliding_window`` says so."""
    layers = values.integer("num_hidden_layers")
    first = layers
    if values.flag("use_sliding_window", default=False):
        first = values.integer("max_window_layers", layers, minimum=0)
    return _window(values, [layer >= first for layer in range(layers)], "max_window_layers")


def _softmax_router(values: HfValues, aux_loss_coeff: float, *, normalize_top_k: bool) -> dict[str, Any]:
    coeff = values.number("router_aux_loss_coef", aux_loss_coeff)
    return {
        "score_function": "softmax",
        "normalize_top_k": normalize_top_k,
        "aux_loss": "aux_loss" if coeff else "none",
        "aux_loss_coeff": coeff,
    }


def llama(values: HfValues) -> dict[str, Any]:
    """Llama 2 to 3.3, dense."""
    values.require("mlp_bias", default=False)
    bias = values.flag("attention_bias", default=False)
    return {
        "attention": _gqa(values, values.integer("num_attention_heads"), qkv_bias=bias, out_bias=bias),
        "dense_ffn_size": values.integer("intermediate_size"),
    }


def qwen2(values: HfValues) -> dict[str, Any]:
    """Qwen2 and Qwen2.5, dense, with query, key and value biases."""
    return {
        "attention": _gqa(values, qkv_bias=True, **_qwen_window(values)),
        "dense_ffn_size": values.integer("intermediate_size"),
    }


def _qwen3_attention(values: HfValues) -> dict[str, Any]:
    bias = values.flag("attention_bias", default=False)
    return _gqa(
        values,
        head_dim=values.integer("head_dim"),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        **_qwen_window(values),
    )


def qwen3(values: HfValues) -> dict[str, Any]:
    """Qwen3, dense, with normalised queries and keys."""
    return {
        "attention": _qwen3_attention(values),
        "dense_ffn_size": values.integer("intermediate_size"),
    }


def _qwen_experts(values: HfValues, *, normalize_top_k: bool = False) -> dict[str, Any]:
    """Routed experts and the placing of their layers, as Qwen2-MoE and Qwen3-MoE write them."""
    dense = values.integers("mlp_only_layers", [])
    period = values.integer("decoder_sparse_step", 1)
    if sorted(dense) != list(range(len(dense))) or (dense and period > 1):
        values.refuse("mlp_only_layers", f"is {dense} with decoder_sparse_step {period}; only the first layers can be")
    has_dense = bool(dense) or period > 1
    return {
        "num_dense_layers": len(dense),
        "moe_layer_period": period,
        "dense_ffn_size": values.integer("intermediate_size") if has_dense else 0,
        "moe": {
            # Releases of transformers from 5 on write the second name.
            "num_experts": values.integer("num_experts" if "num_experts" in values else "num_local_experts"),
            "top_k": values.integer("num_experts_per_tok"),
            "expert_ffn_size": values.integer("moe_intermediate_size"),
            "router": _softmax_router(
                values, 1e-3, normalize_top_k=values.flag("norm_topk_prob", default=normalize_top_k)
            ),
        },
    }


def qwen2_moe(values: HfValues) -> dict[str, Any]:
    """Qwen2-MoE: a gated shared expert beside the routed ones."""
    data = _qwen_experts(values)
    data["moe"] |= {
        "shared_ffn_size": values.integer("shared_expert_intermediate_size", minimum=0),
        "shared_gate": True,
    }
    bias = values.flag("qkv_bias", default=True)
    return data | {"attention": _gqa(values, qkv_bias=bias, **_qwen_window(values))}


def qwen3_moe(values: HfValues) -> dict[str, Any]:
    """Qwen3-MoE: no shared expert."""
    return _qwen_experts(values) | {"attention": _qwen3_attention(values)}


def qwen3_next(values: HfValues) -> dict[str, Any]:
    """Qwen3-Next: gated attention every fourth layer, gated delta nets between, a gated shared expert."""
    return _gated_hybrid(values, hf_qwen3_next.MTP_KEYS["qwen3_next"])


def qwen3_5_moe(values: HfValues) -> dict[str, Any]:
    """The text model of Qwen3.5-MoE: Qwen3-Next with experts in every layer and weights laid out otherwise."""
    values.require("attn_output_gate", default=True)
    values.require("norm_topk_prob", default=True)
    values.require("mtp_use_dedicated_embeddings", default=False)
    return _gated_hybrid(values, hf_qwen3_next.MTP_KEYS["qwen3_5_moe_text"])


def _gated_hybrid(values: HfValues, mtp_key: str) -> dict[str, Any]:
    if values.integer(mtp_key, 0, minimum=0) > 1:
        values.refuse(mtp_key, "is above 1; depths of this family share what joins their inputs")
    data = _qwen_experts(values, normalize_top_k=True)
    data["moe"] |= {
        "shared_ffn_size": values.integer("shared_expert_intermediate_size", 512),
        "shared_gate": True,
    }
    attention = _gqa(values, **hf_qwen3_next.attention_features(values))
    depths = {"num_mtp_layers": values.integer(mtp_key, 0, minimum=0)}
    return data | depths | hf_qwen3_next.mixer_fields(values) | {"attention": attention}


def mixtral(values: HfValues) -> dict[str, Any]:
    """Mixtral: every layer MoE, weights normalised over the chosen experts."""
    windowed = "sliding_window" in values
    return {
        "attention": _gqa(values, **_window(values, [windowed] * values.integer("num_hidden_layers"))),
        "moe": {
            "num_experts": values.integer("num_local_experts"),
            "top_k": values.integer("num_experts_per_tok"),
            "expert_ffn_size": values.integer("intermediate_size"),
            "router": _softmax_router(values, 1e-3, normalize_top_k=True),
        },
    }


def gpt_oss(values: HfValues) -> dict[str, Any]:
    """GPT-OSS: softmax over the chosen logits, which is softmax over all, normalised over the chosen."""
    layers = values.integer("num_hidden_layers")
    values.require("hidden_act", default="silu")
    values.require("swiglu_limit", default=7.0)
    values.require("swiglu_alpha", default=1.702)
    bias = values.flag("attention_bias", default=True)
    window = _window(values, [layer % 2 == 0 for layer in range(layers)])
    attention = _gqa(values, head_dim=values.integer("head_dim"), qkv_bias=bias, out_bias=bias, sinks=True)
    return {
        "attention": attention | window,
        "activation": "clamped_swiglu",
        "moe": {
            "num_experts": values.integer("num_local_experts"),
            "top_k": values.integer("num_experts_per_tok"),
            "expert_ffn_size": values.integer("intermediate_size"),
            "mlp_bias": True,
            "router": _softmax_router(values, 0.9, normalize_top_k=True),
        },
    }


def _deepseek(values: HfValues, router: dict[str, Any]) -> dict[str, Any]:
    """Latent attention, leading dense layers, shared experts: DeepSeek-V2, V3 and Kimi K2 alike."""
    values.require("attention_bias", default=False)
    values.require("moe_layer_freq", default=1)
    values.require("rope_interleave", default=True)
    return _deepseek_experts(values, router) | {
        "attention": {
            "kind": "mla",
            "num_heads": values.integer("num_attention_heads"),
            "q_lora_rank": values.integer_or_null("q_lora_rank") or 0,
            **{
                key: values.integer(key)
                for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            },
        },
    }


def _deepseek_experts(values: HfValues, router: dict[str, Any]) -> dict[str, Any]:
    """Leading dense layers, then routed and shared experts; depths of MTP."""
    expert_ffn_size = values.integer("moe_intermediate_size")
    return {
        "dense_ffn_size": values.integer("intermediate_size"),
        "num_dense_layers": values.integer("first_k_dense_replace", minimum=0),
        "num_mtp_layers": values.integer("num_nextn_predict_layers", 0, minimum=0),
        "moe": {
            "num_experts": values.integer("n_routed_experts"),
            "top_k": values.integer("num_experts_per_tok"),
            "expert_ffn_size": expert_ffn_size,
            "shared_ffn_size": expert_ffn_size * values.integer("n_shared_experts", 0, minimum=0),
            "router": router,
        },
    }


def expert_groups(values: HfValues, defaults: tuple[int | None, int | None], summed: int) -> dict[str, int]:
    """Groups of experts, of which the ``summed`` best scores rank each."""
    groups = {
        "num_groups": values.integer("n_group", defaults[0]),
        "top_groups": values.integer("topk_group", defaults[1]),
    }
    usual = max(1, values.integer("num_experts_per_tok") // groups["top_groups"])
    return groups if groups["num_groups"] == 1 or summed == usual else groups | {"group_score_experts": summed}


def sequence_loss(values: HfValues, default: float) -> dict[str, Any]:
    """The loss that balances each sequence's experts, or where `seq_aux` is false those of all tokens."""
    coeff = values.number("aux_loss_alpha", default)
    loss = "seq_aux_loss" if values.flag("seq_aux", default=True) else "aux_loss"
    return {"aux_loss": loss if coeff else "none", "aux_loss_coeff": coeff}


def _sigmoid_router(values: HfValues, groups: tuple[int, int], scaling_factor: float) -> dict[str, Any]:
    """Sigmoid scores and a bias; where the config names no loss, it is that of DeepSeek-V3's paper."""
    values.text("topk_method", "noaux_tc", allowed=("noaux_tc",))
    return {
        **expert_groups(values, groups, 2),
        "score_function": values.text("scoring_func", "sigmoid", allowed=("sigmoid",)),
        "scaling_factor": values.number("routed_scaling_factor", scaling_factor),
        "normalize_top_k": values.flag("norm_topk_prob", default=True),
        **sequence_loss(values, 1e-4),
        "expert_bias": True,
    }


def deepseek_v2(values: HfValues) -> dict[str, Any]:
    """DeepSeek-V2 and V2-Lite: softmax scores, optionally limited to groups ranked by their best expert."""
    method = values.text("topk_method", "greedy", allowed=("greedy", "group_limited_greedy"))
    values.require("norm_topk_prob", default=False)
    router = {
        **(expert_groups(values, (None, None), 1) if method != "greedy" else {}),
        "score_function": values.text("scoring_func", "softmax", allowed=("softmax",)),
        "scaling_factor": values.number("routed_scaling_factor", 1.0),
        "normalize_top_k": False,
        **sequence_loss(values, 1e-3),
    }
    return _deepseek(values, router)


def deepseek_v3(values: HfValues) -> dict[str, Any]:
    """DeepSeek-V3, Moonlight and Kimi K2: sigmoid scores, balanced by a bias."""
    return _deepseek(values, _sigmoid_router(values, (8, 4), 2.5))


def glm4_moe(values: HfValues) -> dict[str, Any]:
    """GLM-4.5: grouped-query attention of which a part of each head is rotated, experts as in DeepSeek-V3."""
    attention = _gqa(
        values,
        qk_norm=values.flag("use_qk_norm", default=False),
        qkv_bias=values.flag("attention_bias", default=False),
    )
    rotated = int(attention["head_dim"] * rotary_factor(values, 0.5))
    attention["rotary_dim"] = 0 if rotated == attention["head_dim"] else rotated
    return _deepseek_experts(values, _sigmoid_router(values, (1, 1), 1.0)) | {"attention": attention}
