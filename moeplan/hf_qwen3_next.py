"""Where weights of Qwen3-Next and Qwen3.5-MoE lie in a checkpoint, and what their configs say of layers.

Qwen3-Next's linear layers have one matrix for query, key, value and gate (z), key head by key head, and one for both
scalars of a head (b and a); Qwen3.5's have one for query, key and value, one after the other, and three more.
Attention's query matrix has a gate beside each head's query. Norms but the gated one are stored less one. A prediction
depth lies under ``mtp``, its norms and projection beside its layer (vLLM's qwen3_next_mtp.py). Qwen3.5 is published
inside a model of images and text, and with the experts of a layer in one tensor.
"""

import re
from collections.abc import Container
from typing import Any

from moeplan.hf_place import BlockRows, Place
from moeplan.hf_rope import rotary_factor
from moeplan.hf_values import HfValues
from moeplan.mixers import GatedDeltaNet, GqaAttention
from moeplan.model_spec import ModelSpec

QWEN3_NEXT = "qwen3_next"
QWEN3_5 = ("qwen3_5_moe_text", "qwen3_5_moe")  # alone, and inside a model of images and text
FAMILIES = (QWEN3_NEXT, *QWEN3_5)
MTP_PROJECTION = "mtp.fc.weight"
_MTP = {
    "projection": "mtp.fc",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "final_norm": "mtp.norm",
}
# Keys that say how many MTP depths there are.
MTP_KEYS = {QWEN3_NEXT: "num_nextn_predict_layers", QWEN3_5[0]: "mtp_num_hidden_layers"}
_ATTENTION = {"key": "k_proj", "value": "v_proj", "output": "o_proj", "query_norm": "q_norm", "key_norm": "k_norm"}
_TOP = {"embedding.weight": ("embed_tokens.weight", 0.0), "final_norm.weight": ("norm.weight", 1.0)}
_MIXER = {"output.weight": "out_proj.weight", "norm.weight": "norm.weight"}
_SINGLE = {"gate": "z", "beta": "b", "time_step": "a"}
_SCALARS = {"log_decay": "A_log", "time_step.bias": "dt_bias"}


def _trunk(family: str, stored: Container[str]) -> str:
    """What names begin with: Qwen3.5's say that the text model is a part, unless the checkpoint is of it alone."""
    alone = family == QWEN3_NEXT or "model.embed_tokens.weight" in stored
    return "model" if alone else "model.language_model"


def layer_prefix(layer: int, model: ModelSpec, family: str, stored: Container[str]) -> str:
    """What names of a layer's weights begin with, MTP depths included."""
    depth = layer - model.num_layers
    return f"{_trunk(family, stored)}.layers.{layer}" if depth < 0 else f"mtp.layers.{depth}"


def place(name: str, shape: tuple[int, ...], model: ModelSpec, family: str, stored: Container[str]) -> Place | None:
    """The place of our weight ``name``; None where the family's checkpoints are as those of its elder ones.

    ``stored``: names of a checkpoint's tensors, which tell apart the ways in which it may be written.
    """
    if name in _TOP:
        theirs, plus = _TOP[name]
        return Place(f"{_trunk(family, stored)}.{theirs}", shape, plus=plus)
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if found is None:
        return None
    layer, part = int(found[1]), found[2]
    depth = layer - model.num_layers
    if depth >= 0 and (outside := part.removesuffix(".weight")) in _MTP:
        return Place(f"{_MTP[outside]}.weight", shape, plus=float(outside != "projection"))
    prefix = layer_prefix(layer, model, family, stored)
    if part in ("attention_norm.weight", "mixer_norm.weight"):
        return Place(f"{prefix}.input_layernorm.weight", shape, plus=1.0)
    if part == "mlp_norm.weight":
        return Place(f"{prefix}.post_attention_layernorm.weight", shape, plus=1.0)
    block, _, rest = part.partition(".")
    if block == "experts" and f"{prefix}.mlp.experts.down_proj" in stored:
        return _stacked_place(rest, shape, f"{prefix}.mlp.experts", model)
    if block == "attention" and isinstance(model.attention, GqaAttention):
        return _attention_place(rest, shape, f"{prefix}.self_attn", model.attention)
    if block == "mixer" and isinstance(model.linear_mixer, GatedDeltaNet):
        return _mixer_place(rest, shape, f"{prefix}.linear_attn", model.linear_mixer, family)
    return None


def _stacked_place(part: str, shape: tuple[int, ...], prefix: str, model: ModelSpec) -> Place:
    """All experts in one tensor, transposed; rows of gate before those of up."""
    assert model.moe is not None
    expert, matrix, _ = part.split(".")
    num_experts, width = model.moe.num_experts, model.moe.expert_ffn_size
    if matrix == "down":
        return Place(f"{prefix}.down_proj", (num_experts, *shape[::-1]), (int(expert),), transposed=True)
    rows = slice(0, width) if matrix == "gate" else slice(width, None)
    return Place(f"{prefix}.gate_up_proj", (num_experts, 2 * width, shape[0]), (int(expert), rows), transposed=True)


def _attention_place(part: str, shape: tuple[int, ...], prefix: str, attention: GqaAttention) -> Place:
    """``part`` is query.weight and so on; query and gate lie in turns, head by head."""
    matrix, kind = part.rsplit(".", 1)
    if matrix in ("query", "gate"):
        width = attention.head_dim
        rows = BlockRows(width, 2 * width, width * (matrix == "gate"))
        return Place(f"{prefix}.q_proj.{kind}", (2 * shape[0], *shape[1:]), rows=rows)
    return Place(f"{prefix}.{_ATTENTION[matrix]}.{kind}", shape, plus=float(matrix.endswith("_norm")))


def _mixer_place(part: str, shape: tuple[int, ...], prefix: str, mixer: GatedDeltaNet, family: str) -> Place:
    if part in _MIXER:
        return Place(f"{prefix}.{_MIXER[part]}", shape)
    if part in _SCALARS:
        return Place(f"{prefix}.{_SCALARS[part]}", shape)
    keys = mixer.num_k_heads * mixer.k_head_dim
    first = {"query": 0, "key": keys, "value": 2 * keys}
    matrix = part.removesuffix(".weight")
    if matrix.endswith("_conv"):
        whole = (mixer.conv_size, 1, mixer.conv_kernel)
        return Place(f"{prefix}.conv1d.weight", whole, (slice(first[matrix.removesuffix("_conv")], None), 0))
    if family == QWEN3_NEXT:
        return _interleaved_place(matrix, shape, prefix, mixer)
    if matrix in first:
        return Place(f"{prefix}.in_proj_qkv.weight", (mixer.conv_size, shape[1]), (slice(first[matrix], None),))
    return Place(f"{prefix}.in_proj_{_SINGLE[matrix]}.weight", shape)


def _interleaved_place(matrix: str, shape: tuple[int, ...], prefix: str, mixer: GatedDeltaNet) -> Place:
    """Matrices that lie in one of Qwen3-Next's two, key head by key head."""
    share = mixer.num_v_heads // mixer.num_k_heads
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
        types, key = values.layer_types("linear_attention", "full_attention"), "layer_types"
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


def config_keys(model: ModelSpec, family: str) -> dict[str, Any]:
    """The keys of a config that say the same, and how many MTP depths there are, which transformers does not read."""
    attention, mixer = model.attention, model.linear_mixer
    rotated = 1.0
    if isinstance(attention, GqaAttention) and attention.rotary_dim:
        rotated = attention.rotary_dim / attention.head_dim
    kinds = ["full_attention" if kind.mixer == "attention" else "linear_attention" for kind in model.layer_kinds]
    config: dict[str, Any] = {
        "partial_rotary_factor": rotated,
        "layer_types": kinds,
        MTP_KEYS[family]: model.num_mtp_layers,
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
