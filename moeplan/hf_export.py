"""ModelSpec to Hugging Face: the ``config.json`` of the family that holds the model.

A family holds a model when :func:`moeplan.hf_config.model_from_hf_config` reads the same model back from the config
that was written, but for the name and what only training uses (balancing losses, bias update).
"""

from typing import Any

from moeplan import hf_nemotron, hf_qwen3_next
from moeplan.errors import InvalidInputError
from moeplan.hf_config import ACTIVATIONS, model_from_hf_config
from moeplan.hf_rope import rope_config
from moeplan.mixers import GqaAttention, MlaAttention
from moeplan.model_spec import ModelSpec

# Class by family, in the order in which families are tried.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
}
_TRAINING_ONLY = {"aux_loss": "none", "aux_loss_coeff": 0.0, "z_loss_coeff": 0.0, "bias_update_rate": 0.0}
_HF_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())} | {"clamped_swiglu": "silu"}


def hf_config_of(model: ModelSpec) -> dict[str, Any]:
    """The config of the family that the model was imported from, else of the first that holds it.

    InvalidInputError where none does: it names the family that comes nearest and what differs there.
    """
    nearest: tuple[str, list[str]] | None = None
    for family in sorted(ARCHITECTURES, key=lambda family: f"model_type {family}" not in model.source):
        config = _candidate(model, family)
        try:
            read_back = model_from_hf_config(config, "config.json")
        except InvalidInputError:
            continue
        differing = model_differences(model, read_back)
        if not differing:
            return config
        if nearest is None or len(differing) < len(nearest[1]):
            nearest = family, differing
    where = f"; nearest is {nearest[0]}, where {', '.join(nearest[1])} would differ" if nearest else ""
    raise InvalidInputError(
        f"export: no Hugging Face family holds model {model.name}{where}",
        f"leave export_hf out, or change the model; families: {', '.join(ARCHITECTURES)}",
    )


def model_differences(model: ModelSpec, other: ModelSpec) -> list[str]:
    """Key paths that differ, what only names or trains the model left out."""
    ours, theirs = _flat(_comparable(model)), _flat(_comparable(other))
    return [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]


def _comparable(model: ModelSpec) -> dict[str, Any]:
    data = model.model_dump(exclude={"name", "source", "mtp_loss_scaling_factor"})
    if data["moe"] is not None:
        data["moe"]["router"] |= _TRAINING_ONLY
        router = data["moe"]["router"]
        usual = max(1, data["moe"]["top_k"] // router["top_groups"])
        router["group_score_experts"] = router["group_score_experts"] or usual
        if router["num_groups"] == 1:
            router |= {"top_groups": 1, "group_score_experts": None}
    data["attention_period"] = min(model.attention_period, model.num_layers + 1)  # beyond, no layer attends
    if model.mtp_shared:  # a checkpoint has one depth, however often it is run
        data |= {"mtp_shared": False, "num_mtp_layers": min(model.num_mtp_layers, 1)}
    if not model.has_dense_mlp:
        data["dense_ffn_size"] = 0  # a width that no layer has
    return data


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _candidate(model: ModelSpec, family: str) -> dict[str, Any]:
    if family == hf_nemotron.FAMILY:
        return hf_nemotron.config_of(model)
    attention = model.attention
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "torch_dtype": "bfloat16",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "intermediate_size": model.dense_ffn_size or model.hidden_size,
        "hidden_act": _HF_ACTIVATIONS.get(model.activation, model.activation),
        "rms_norm_eps": model.norm_eps,
        **rope_config(model),
        "tie_word_embeddings": model.tied_embeddings,
    }
    if isinstance(attention, GqaAttention):
        config |= _grouped(model, attention, family)
    else:
        config |= _latent(attention)
    return config | _experts(model, family)


def _grouped(model: ModelSpec, attention: GqaAttention, family: str) -> dict[str, Any]:
    bias = attention.qkv_bias if family == "glm4_moe" else attention.out_bias
    config = {"head_dim": attention.head_dim, "attention_bias": bias, **_window(model, attention, family)}
    if family == "qwen2_moe":
        config["qkv_bias"] = attention.qkv_bias
    if family in hf_qwen3_next.FAMILIES:
        config |= hf_qwen3_next.config_keys(model, family)
    if family == "glm4_moe":
        rotated = (attention.rotary_dim or attention.head_dim) / attention.head_dim
        config |= {"partial_rotary_factor": rotated, "use_qk_norm": attention.qk_norm}
    return config


def _window(model: ModelSpec, attention: GqaAttention, family: str) -> dict[str, Any]:
    if attention.sliding_window is None:
        full = {"layer_types": ["full_attention"] * model.num_layers} if family == "gpt_oss" else {}
        return {"use_sliding_window": False} if family.startswith("qwen") else full
    windowed = [model.is_windowed(layer) for layer in range(model.num_layers)]
    return {
        "use_sliding_window": True,
        "sliding_window": attention.sliding_window,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
    }


def _latent(attention: MlaAttention) -> dict[str, Any]:
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"q_lora_rank": attention.q_lora_rank or None, **{key: getattr(attention, key) for key in keys}}


def _experts(model: ModelSpec, family: str) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    config: dict[str, Any] = {
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.router.aux_loss_coeff,
        "norm_topk_prob": moe.router.normalize_top_k,
    }
    if family == "mixtral":
        return config | {"num_local_experts": moe.num_experts, "intermediate_size": moe.expert_ffn_size}
    if family == "gpt_oss":
        config |= {"num_local_experts": moe.num_experts, "intermediate_size": moe.expert_ffn_size}
        # Without a kind of its own this family's class would take YaRN.
        return {"rope_scaling": {"rope_type": "default"}} | config if model.rope_scaling is None else config
    config["moe_intermediate_size"] = moe.expert_ffn_size
    if family.startswith("qwen"):
        return config | {
            "num_experts": moe.num_experts,
            "decoder_sparse_step": model.moe_layer_period,
            "mlp_only_layers": list(range(model.num_dense_layers)),
            "shared_expert_intermediate_size": moe.shared_ffn_size,
        }
    method = "greedy" if family == "deepseek_v2" else "noaux_tc"
    if family == "deepseek_v2" and moe.router.num_groups > 1:
        method = "group_limited_greedy"
    return config | {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_ffn_size // moe.expert_ffn_size,
        "first_k_dense_replace": model.num_dense_layers,
        "moe_layer_freq": model.moe_layer_period,
        "n_group": moe.router.num_groups,
        "topk_group": moe.router.top_groups,
        "topk_method": method,
        "scoring_func": moe.router.score_function,
        "routed_scaling_factor": moe.router.scaling_factor,
        "num_nextn_predict_layers": model.num_mtp_layers,
    }
