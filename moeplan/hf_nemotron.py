"""Nemotron-H and Nemotron 3: their config, and where their weights lie in a checkpoint.

A layer is a norm and one mixer, whatever its kind. Mamba's input matrix has gate, values, keys, queries and time steps
one after the other, its convolution values, keys and queries. Layers of a prediction depth lie under ``mtp``, two a
depth. transformers bounds time steps from below by ``time_step_min``, which training does not know of: a config that is
written has a bound that no step comes near.
"""

import re
from typing import Any

from moeplan.hf_families import expert_groups, sequence_loss
from moeplan.hf_place import Place
from moeplan.hf_values import HfValues
from moeplan.mixers import GqaAttention, Mamba2
from moeplan.model_spec import ModelSpec

FAMILY = "nemotron_h"
# By symbol of a pattern, what releases before 5 of transformers call a layer, and what later ones do.
_KINDS = {"M": ("mamba", "linear_attention"), "*": ("attention", "full_attention"), "-": ("mlp",), "E": ("moe",)}
_SYMBOLS = {kind: symbol for symbol, kinds in _KINDS.items() for kind in kinds}
_DEPTH = "*E"  # the layers of a prediction depth
_NO_BOUND = 1e-9

_TOP = {
    "embedding.weight": "backbone.embeddings.weight",
    "final_norm.weight": "backbone.norm_f.weight",
    "head.weight": "lm_head.weight",
}
_OUTSIDE = {
    "embedding_norm": (0, "enorm"),
    "hidden_norm": (0, "hnorm"),
    "projection": (0, "eh_proj"),
    "final_norm": (1, "final_layernorm"),
}
_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
_MLP = {"up": "up_proj", "down": "down_proj"}
_MIXER = {
    "output.weight": "out_proj.weight",
    "norm.weight": "norm.weight",
    "log_rate": "A_log",
    "time_step.bias": "dt_bias",
    "skip": "D",
}
_ROUTER = {
    "router.weight": "gate.weight",
    "router.expert_bias": "gate.e_score_correction_bias",
    "latent_down.weight": "fc1_latent_proj.weight",
    "latent_up.weight": "fc2_latent_proj.weight",
}


def place(name: str, shape: tuple[int, ...], model: ModelSpec) -> Place:
    """The place of our weight ``name``."""
    if name in _TOP:
        return Place(_TOP[name], shape)
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    assert found is not None
    layer, part = int(found[1]), found[2]
    depth = layer - model.num_layers
    if depth >= 0 and (outside := part.removesuffix(".weight")) in _OUTSIDE:
        second, theirs = _OUTSIDE[outside]
        return Place(f"mtp.layers.{2 * depth + second}.{theirs}.weight", shape)
    block, _, rest = part.partition(".")
    is_second = depth >= 0 and block not in ("attention", "attention_norm")
    prefix = f"backbone.layers.{layer}" if depth < 0 else f"mtp.layers.{2 * depth + is_second}"
    if block.endswith("_norm"):
        return Place(f"{prefix}.norm.weight", shape)
    return _block_place(block, rest, shape, f"{prefix}.mixer", model)


def _block_place(block: str, rest: str, shape: tuple[int, ...], prefix: str, model: ModelSpec) -> Place:
    if block == "mixer" and isinstance(model.linear_mixer, Mamba2):
        return _mamba_place(rest, shape, prefix, model.linear_mixer)
    if f"{block}.{rest}" in _ROUTER:
        return Place(f"{prefix}.{_ROUTER[f'{block}.{rest}']}", shape)
    matrix = rest.removesuffix(".weight")
    if block == "experts":
        number, matrix = matrix.split(".")
        return Place(f"{prefix}.experts.{number}.{_MLP[matrix]}.weight", shape[::-1], transposed=True)
    inside = {"attention": ("", _ATTENTION), "mlp": ("", _MLP), "shared_expert": ("shared_experts.", _MLP)}
    before, names = inside[block]
    return Place(f"{prefix}.{before}{names[matrix]}.weight", shape)


def _mamba_place(part: str, shape: tuple[int, ...], prefix: str, mixer: Mamba2) -> Place:
    if part in _MIXER:
        return Place(f"{prefix}.{_MIXER[part]}", shape)
    shared = mixer.num_groups * mixer.state_size
    widths = {"gate": mixer.inner_size, "value": mixer.inner_size, "key": shared, "query": shared}
    widths["time_step"] = mixer.num_heads
    matrix, kind = part.split(".")
    names = list(widths)
    first = sum(widths[name] for name in names[: names.index(matrix.removesuffix("_conv"))])
    if not matrix.endswith("_conv"):
        return Place(f"{prefix}.in_proj.weight", (sum(widths.values()), shape[1]), (slice(first, None),))
    rows = slice(first - mixer.inner_size, None)  # the gate has no convolution
    if kind == "bias":
        return Place(f"{prefix}.conv1d.bias", (mixer.conv_size,), (rows,))
    return Place(f"{prefix}.conv1d.weight", (mixer.conv_size, 1, mixer.conv_kernel), (rows, 0))


def fields(values: HfValues) -> dict[str, Any]:
    """All fields of ModelSpec but name and source."""
    _refuse_others(values)
    pattern = _pattern(values)
    layers = values.integer("num_hidden_layers", len(pattern))
    if layers != len(pattern):
        values.refuse("num_hidden_layers", f"is {layers}; the pattern has {len(pattern)} layers")
    depths = values.integer("num_nextn_predict_layers", 0, minimum=0)
    if depths:
        _check_depth(values)
    attention = {
        "kind": "gqa",
        "num_heads": values.integer("num_attention_heads"),
        "num_kv_heads": values.integer("num_key_value_heads"),
        "head_dim": values.integer("head_dim", values.integer("attention_head_dim", 128)),
        "rotary": False,
    }
    return {
        "num_layers": len(pattern),
        "layer_pattern": pattern,
        "hidden_size": values.integer("hidden_size"),
        "vocab_size": values.integer("vocab_size"),
        "activation": "squared_relu",
        "norm_eps": values.number("layer_norm_epsilon", values.number("norm_eps", 1e-5)),
        "attention": attention,
        "linear_mixer": _mamba(values) if "M" in pattern else None,
        "dense_ffn_size": values.integer("intermediate_size") if "-" in pattern else 0,
        "moe": _experts(values) if "E" in pattern else None,
        "num_mtp_layers": depths,
        "mtp_shared": depths > 0 and values.flag("mtp_use_repeated_layer", default=False),
    }


def _mamba(values: HfValues) -> dict[str, Any]:
    return {
        "kind": "mamba2",
        "num_heads": values.integer("mamba_num_heads"),
        "head_dim": values.integer("mamba_head_dim"),
        "state_size": values.integer("ssm_state_size", 128),
        "num_groups": values.integer("n_groups", 8),
        "conv_kernel": values.integer("conv_kernel", 4),
        "chunk_size": values.integer("chunk_size", 128),
    }


def _refuse_others(values: HfValues) -> None:
    """Raises for what the family's class can do and no published model does."""
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"):
        values.require(key, default=False)
    values.require("tie_word_embeddings", default=False)  # transformers has no tied head of this family
    values.require("use_conv_bias", default=True)
    values.require("mamba_hidden_act", default="silu")
    values.require("mlp_hidden_act", default="relu2")
    if "sliding_window" in values:
        values.refuse("sliding_window", "is set; of this family attention to all keys can be imported")


def _pattern(values: HfValues) -> str:
    key = next((one for one in ("layers_block_type", "layer_types") if one in values), None)
    if key is None:
        pattern = values.text("hybrid_override_pattern")
        if unknown := sorted(set(pattern) - set(_KINDS)):
            values.refuse("hybrid_override_pattern", f"holds {unknown[0]!r}; {' '.join(_KINDS)} can be imported")
        return pattern
    types = values.texts(key)
    if unknown := sorted(set(types) - set(_SYMBOLS)):
        values.refuse(key, f"holds {unknown[0]!r}; {', '.join(_SYMBOLS)} can be imported")
    return "".join(_SYMBOLS[one] for one in types)


def _check_depth(values: HfValues) -> None:
    if "mtp_hybrid_override_pattern" in values:
        values.require("mtp_hybrid_override_pattern", default=_DEPTH)
    elif "mtp_layers_block_type" in values:
        types = values.texts("mtp_layers_block_type")
        if "".join(_SYMBOLS.get(one, "?") for one in types) != _DEPTH:
            values.refuse("mtp_layers_block_type", f"is {types}; attention and moe can be imported")


def _experts(values: HfValues) -> dict[str, Any]:
    return {
        "num_experts": values.integer("n_routed_experts"),
        "top_k": values.integer("num_experts_per_tok"),
        "expert_ffn_size": values.integer("moe_intermediate_size"),
        "shared_ffn_size": values.integer("moe_shared_expert_intermediate_size", minimum=0),
        "latent_size": values.integer("moe_latent_size", 0, minimum=0),
        "router": {
            **expert_groups(values, (1, 1), 2),
            "score_function": "sigmoid",
            "scaling_factor": values.number("routed_scaling_factor", 1.0),
            "normalize_top_k": values.flag("norm_topk_prob", default=True),
            **sequence_loss(values, 1e-4),
            "expert_bias": True,
        },
    }


def config_of(model: ModelSpec) -> dict[str, Any]:
    """The config that says the same, as far as this family can; patterns as published configs have them."""
    attention, mixer, moe = model.attention, model.linear_mixer, model.moe
    config: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": FAMILY,
        "torch_dtype": "bfloat16",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "hybrid_override_pattern": model.layer_pattern,
        "intermediate_size": model.dense_ffn_size or model.hidden_size,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        "num_nextn_predict_layers": model.num_mtp_layers,
    }
    if model.num_mtp_layers:
        config |= {"mtp_hybrid_override_pattern": _DEPTH, "mtp_use_repeated_layer": model.mtp_shared}
    if isinstance(attention, GqaAttention):
        config |= {
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
        }
    if isinstance(mixer, Mamba2):
        config |= {
            "mamba_num_heads": mixer.num_heads,
            "mamba_head_dim": mixer.head_dim,
            "ssm_state_size": mixer.state_size,
            "n_groups": mixer.num_groups,
            "conv_kernel": mixer.conv_kernel,
            "chunk_size": mixer.chunk_size,
            "time_step_min": _NO_BOUND,
        }
    if moe is not None:
        config |= {
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.expert_ffn_size,
            "moe_shared_expert_intermediate_size": moe.shared_ffn_size,
            "moe_latent_size": moe.latent_size or None,
            "n_group": moe.router.num_groups,
            "topk_group": moe.router.top_groups,
            "routed_scaling_factor": moe.router.scaling_factor,
            "norm_topk_prob": moe.router.normalize_top_k,
        }
    return config
