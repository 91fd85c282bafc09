"""Where Qwen3-Next's weights lie in a checkpoint, and what its config says of its layers.

Linear layers have one matrix for query, key, value and gate (z), key head by key head, and one for both scalars of a
head (b and a); attention's query matrix has a gate beside each head's query. Norms but the gated one are stored less
one. A prediction depth lies under ``mtp``, its norms and projection beside its layer (vLLM's qwen3_next_mtp.py).
"""

import re
from typing import Any

from moeplan.hf_place import BlockRows, Place
from moeplan.hf_rope import rotary_factor
from moeplan.hf_values import HfValues
from moeplan.mixers import GatedDeltaNet, GqaAttention
from moeplan.model_spec import ModelSpec

FAMILY = "qwen3_next"
MTP_PROJECTION = "mtp.fc.weight"
_MTP = {
    "projection": "mtp.fc",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "final_norm": "mtp.norm",
}
_ATTENTION = {"key": "k_proj", "value": "v_proj", "output": "o_proj", "query_norm": "q_norm", "key_norm": "k_norm"}
_MIXER = {"output.weight": "out_proj.weight", "norm.weight": "norm.weight"}
_SCALARS = {"log_decay": "A_log", "time_step.bias": "dt_bias"}


def layer_prefix(layer: int, model: ModelSpec) -> str:
    """What names of a layer's weights begin with, MTP depths included."""
    depth = layer - model.num_layers
    return f"model.layers.{layer}" if depth < 0 else f"mtp.layers.{depth}"


def place(name: str, shape: tuple[int, ...], model: ModelSpec) -> Place | None:
    """The place of our weight ``name``; None where the family's checkpoints are as those of its elder ones."""
    if name == "final_norm.weight":
        return Place("model.norm.weight", shape, plus=1.0)
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if found is None:
        return None
    layer, part = int(found[1]), found[2]
    depth = layer - model.num_layers
    if depth >= 0 and (outside := part.removesuffix(".weight")) in _MTP:
        return Place(f"{_MTP[outside]}.weight", shape, plus=float(outside != "projection"))
    prefix = layer_prefix(layer, model)
    if part in ("attention_norm.weight", "mixer_norm.weight"):
        return Place(f"{prefix}.input_layernorm.weight", shape, plus=1.0)
    if part == "mlp_norm.weight":
        return Place(f"{prefix}.post_attention_layernorm.weight", shape, plus=1.0)
    block, _, rest = part.partition(".")
    if block == "attention" and isinstance(model.attention, GqaAttention):
        return _attention_place(rest, shape, f"{prefix}.self_attn", model.attention)
    if block == "mixer" and isinstance(model.linear_mixer, GatedDeltaNet):
        return _mixer_place(rest, shape, f"{prefix}.linear_attn", model.linear_mixer)
    return None


def _attention_place(part: str, shape: tuple[int, ...], prefix: str, attention: GqaAttention) -> Place:
    """``part`` is query.weight and so on; query and gate lie in turns, head by head."""
    matrix, kind = part.rsplit(".", 1)
    if matrix in ("query", "gate"):
        width = attention.head_dim
        rows = BlockRows(width, 2 * width, width * (matrix == "gate"))
        return Place(f"{prefix}.q_proj.{kind}", (2 * shape[0], *shape[1:]), rows=rows)
    return Place(f"{prefix}.{_ATTENTION[matrix]}.{kind}", shape, plus=float(matrix.endswith("_norm")))


def _mixer_place(part: str, shape: tuple[int, ...], prefix: str, mixer: GatedDeltaNet) -> Place:
    if part in _MIXER:
        return Place(f"{prefix}.{_MIXER[part]}", shape)
    if part in _SCALARS:
        return Place(f"{prefix}.{_SCALARS[part]}", shape)
    keys, share = mixer.num_k_heads * mixer.k_head_dim, mixer.num_v_heads // mixer.num_k_heads
    if part.endswith("_conv.weight"):
        first = {"query": 0, "key": keys, "value": 2 * keys}[part.removesuffix("_conv.weight")]
        whole = (mixer.conv_size, 1, mixer.conv_kernel)
        return Place(f"{prefix}.conv1d.weight", whole, (slice(first, None), 0))
    matrix = part.removesuffix(".weight")
    if matrix in ("beta", "time_step"):
        rows = BlockRows(share, 2 * share, share * (matrix == "time_step"))
        return Place(f"{prefix}.in_proj_ba.weight", (2 * mixer.num_v_heads, shape[1]), rows=rows)
    sizes = {
        "query": mixer.k_head_dim,
        "key": mixer.k_head_dim,
        "value": share * mixer.v_head_dim,
        "gate": share * mixer.v_head_dim,
    }
    names = list(sizes)
    before = sum(sizes[name] for name in names[: names.index(matrix)])
    block = sum(sizes.values())
    rows = BlockRows(sizes[matrix], block, before)
    return Place(f"{prefix}.in_proj_qkvz.weight", (mixer.num_k_heads * block, shape[1]), rows=rows)


def mixer_fields(values: HfValues) -> dict[str, Any]:
    """``linear_mixer`` and ``attention_period`` of ModelSpec; InvalidInputError where no period is every layer's."""
    layers = values.integer("num_hidden_layers")
    if "layer_types" in values:
        types, key = values.texts("layer_types"), "layer_types"
        if unknown := sorted(set(types) - {"linear_attention", "full_attention"}):
            values.refuse(key, f"holds {unknown[0]!r}; linear_attention and full_attention can be imported")
        if len(types) != layers:
            values.refuse(key, f"has {len(types)} entries for {layers} layers")
        attends = [kind == "full_attention" for kind in types]
    else:
        interval, key = values.integer("full_attention_interval", 4), "full_attention_interval"
        attends = [(layer + 1) % interval == 0 for layer in range(layers)]
    periods = range(1, layers + 2)
    period = next((n for n in periods if attends == [i % n == n - 1 for i in range(layers)]), None)
    if period is None:
        values.refuse(key, "attends in other layers than every n-th, the last of each n")
    if period == 1:
        return {}
    names = {
        "num_k_heads": ("linear_num_key_heads", 16),
        "num_v_heads": ("linear_num_value_heads", 32),
        "k_head_dim": ("linear_key_head_dim", 128),
        "v_head_dim": ("linear_value_head_dim", 128),
        "conv_kernel": ("linear_conv_kernel_dim", 4),
    }
    sizes = {ours: values.integer(*theirs) for ours, theirs in names.items()}
    return {"attention_period": period, "linear_mixer": {"kind": "gated_delta_net", **sizes}}


def attention_features(values: HfValues) -> dict[str, Any]:
    """What attention has beside its sizes."""
    width = values.integer("head_dim", 256)
    rotated = int(width * rotary_factor(values, 0.25))
    bias = values.flag("attention_bias", default=False)
    return {
        "head_dim": width,
        "rotary_dim": 0 if rotated == width else rotated,
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "output_gate": True,
    }


def config_keys(model: ModelSpec) -> dict[str, Any]:
    """The keys of a config that say the same, and how many MTP depths there are, which only vLLM reads."""
    attention, mixer = model.attention, model.linear_mixer
    rotated = 1.0
    if isinstance(attention, GqaAttention) and attention.rotary_dim:
        rotated = attention.rotary_dim / attention.head_dim
    kinds = ["full_attention" if kind.mixer == "attention" else "linear_attention" for kind in model.layer_kinds]
    config: dict[str, Any] = {
        "partial_rotary_factor": rotated,
        "layer_types": kinds,
        "num_nextn_predict_layers": model.num_mtp_layers,
    }
    if isinstance(mixer, GatedDeltaNet):
        config |= {
            "linear_num_key_heads": mixer.num_k_heads,
            "linear_num_value_heads": mixer.num_v_heads,
            "linear_key_head_dim": mixer.k_head_dim,
            "linear_value_head_dim": mixer.v_head_dim,
            "linear_conv_kernel_dim": mixer.conv_kernel,
        }
    return config
