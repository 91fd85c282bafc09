"""Where each weight of a model lies in a Hugging Face checkpoint of a family: under what name, and how laid out."""

import re
from collections.abc import Container

from moeplan import hf_nemotron, hf_qwen3_next
from moeplan.hf_place import PairedRows, Place
from moeplan.mixers import GqaAttention, MlaAttention
from moeplan.model_spec import ModelSpec
from moeplan.weights import weight_shapes


def checkpoint_places(model: ModelSpec, family: str, stored: Container[str] = ()) -> dict[str, list[Place]]:
    """Places of every weight by our name. MTP depths have copies of embedding and head there, but in hybrids.

    ``stored``: names of tensors of a checkpoint that is there, as families are written in more than one way.
    """
    places = {name: [_place(name, shape, model, family, stored)] for name, shape in weight_shapes(model).items()}
    if family in (hf_nemotron.FAMILY, *hf_qwen3_next.FAMILIES):
        return places
    head = "embedding.weight" if model.tied_embeddings else "head.weight"
    for layer in range(model.num_layers, model.num_layers + model.num_mtp_layers):
        for name, copy in (("embedding.weight", "embed_tokens"), (head, "shared_head.head")):
            shape = (model.vocab_size, model.hidden_size)
            places[name].append(Place(f"model.layers.{layer}.{copy}.weight", shape))
    return places


def _place(name: str, shape: tuple[int, ...], model: ModelSpec, family: str, stored: Container[str]) -> Place:
    if family == hf_nemotron.FAMILY:
        return hf_nemotron.place(name, shape, model)
    if ".experts." in name and family == "gpt_oss":
        return _stacked(name, shape, model)
    if family in hf_qwen3_next.FAMILIES:
        own = hf_qwen3_next.place(name, shape, model, family, stored)
        if own is not None:
            return own
    theirs = hf_weight_name(name, model, family, stored)
    if ".experts." in name:
        return Place(theirs, shape[::-1], transposed=True)
    attention, rows = model.attention, None
    if isinstance(attention, MlaAttention):
        if name.endswith("attention.query_up.weight"):
            rows = PairedRows(attention.qk_head_dim, attention.qk_rope_head_dim)
        if name.endswith("attention.key_value_down.weight"):
            rows = PairedRows(shape[0], attention.qk_rope_head_dim)
    return Place(theirs, shape, rows=rows)


def _stacked(name: str, shape: tuple[int, ...], model: ModelSpec) -> Place:
    """GPT-OSS: all experts in one tensor, columns of gate and up in turn."""
    found = re.fullmatch(r"layers\.(\d+)\.experts\.(\d+)\.(gate|up|down)\.(weight|bias)", name)
    assert found is not None
    assert model.moe is not None
    layer, expert, part, kind = found.groups()
    matrix = "down_proj" if part == "down" else "gate_up_proj"
    theirs = f"model.layers.{layer}.mlp.experts.{matrix}{'_bias' if kind == 'bias' else ''}"
    num_experts = model.moe.num_experts
    if part == "down":
        return Place(theirs, (num_experts, *shape), (int(expert),))
    columns = slice(0 if part == "gate" else 1, None, 2)
    before = (slice(None),) * (len(shape) - 1)
    return Place(theirs, (num_experts, *shape[:-1], 2 * shape[-1]), (int(expert), *before, columns))


_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_GQA = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
}
_MLA = {
    "query_down": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "query_up": "q_b_proj",
    "key_value_down": "kv_a_proj_with_mqa",
    "key_value_norm": "kv_a_layernorm",
    "key_value_up": "kv_b_proj",
    "output": "o_proj",
}
_TOP = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LAYER = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "shared_gate": "mlp.shared_expert_gate",
    # Of MTP depths, which follow the decoder's layers.
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "shared_head.norm",
}


def hf_weight_name(name: str, model: ModelSpec, family: str, stored: Container[str] = ()) -> str:
    """Hugging Face's name of the weight that moeplan calls ``name``. KeyError for one that the family has not."""
    if name in _TOP:
        return _TOP[name]
    found = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias|expert_bias|sinks)", name)
    if found is None:
        raise KeyError(name)
    layer, part, kind = found.groups()
    ending = {"expert_bias": "e_score_correction_bias"}.get(kind, kind)
    prefix = f"model.layers.{layer}"
    if family in hf_qwen3_next.FAMILIES:
        prefix = hf_qwen3_next.layer_prefix(int(layer), model, family, stored)
    return f"{prefix}.{_layer_part(part, model, family)}.{ending}"


def _layer_part(part: str, model: ModelSpec, family: str) -> str:
    if part in _LAYER:
        return _LAYER[part]
    block, _, rest = part.partition(".")
    if block == "attention":
        return _attention_part(rest, model)
    if block == "mlp":
        return f"mlp.{_MLP[rest]}"
    experts = "block_sparse_moe" if family == "mixtral" else "mlp"
    if block == "router":
        return f"{experts}.{'router' if family == 'gpt_oss' else 'gate'}"
    if block == "experts":
        number, matrix = rest.split(".")
        return f"{experts}.experts.{number}.{(_MIXTRAL if family == 'mixtral' else _MLP)[matrix]}"
    if block == "shared_expert":
        return f"mlp.{'shared_expert' if family.startswith('qwen') else 'shared_experts'}.{_MLP[rest]}"
    raise KeyError(part)


def _attention_part(part: str, model: ModelSpec) -> str:
    attention = model.attention
    if not part:  # of the sinks, which lie directly in attention
        return "self_attn"
    if isinstance(attention, GqaAttention):
        return f"self_attn.{_GQA[part]}"
    direct = part == "query_up" and not attention.q_lora_rank
    return "self_attn.q_proj" if direct else f"self_attn.{_MLA[part]}"
