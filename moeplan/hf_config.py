"""Hugging Face ``config.json`` to ModelSpec, one small function per family.

What a config leaves out gets the default of that family's class in transformers.
"""

from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from moeplan import hf_families, hf_nemotron, hf_qwen3_next
from moeplan.errors import InvalidInputError
from moeplan.files import validate
from moeplan.hf_rope import rope_fields, rotary_factor
from moeplan.hf_values import HfValues
from moeplan.model_spec import ModelSpec

# Gated MLPs only: no importable family has another kind. GELU is the exact one; its approximations are not imported.
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}


def model_from_hf_config(config: Any, where: str) -> ModelSpec:
    """The model that the parsed ``config.json`` describes; ``where`` (its path) names it and is named by errors.

    Raises InvalidInputError for an unknown family, a missing key, a wrong type or a feature ModelSpec cannot hold.
    """
    if not isinstance(config, dict):
        raise InvalidInputError(
            f"{where}: a Hugging Face config is an object, got {type(config).__name__}", "give a model's config.json"
        )
    values = HfValues(config, where)
    family = values.text("model_type")
    if family not in FAMILIES:
        raise InvalidInputError(
            f"{where}: model_type {family!r} cannot be imported", f"families: {', '.join(sorted(FAMILIES))}"
        )
    named: dict[str, Any] = {"name": _name(values, family)}
    if family == "qwen3_5_moe":  # a model of images and text, of which the latter's is one of ours
        named["tied_embeddings"] = values.flag("tie_word_embeddings", default=False)
        values, family = values.inner("text_config"), "qwen3_5_moe_text"
    named["source"] = f"Hugging Face config.json, model_type {family}"
    trunk = {} if family == hf_nemotron.FAMILY else _trunk(values, family)
    data = trunk | FAMILIES[family](values) | named
    return validate(ModelSpec, data, where)


def _trunk(values: HfValues, family: str) -> dict[str, Any]:
    """What every family but Nemotron has; families overwrite parts of it."""
    activation = values.text("hidden_act", "silu", allowed=tuple(ACTIVATIONS))
    if family not in ("glm4_moe", *hf_qwen3_next.FAMILIES) and rotary_factor(values, 1.0) != 1:
        values.refuse("partial_rotary_factor", "is not 1; of this family only whole heads can be imported")
    return {
        "num_layers": values.integer("num_hidden_layers"),
        "hidden_size": values.integer("hidden_size"),
        "vocab_size": values.integer("vocab_size"),
        "tied_embeddings": values.flag("tie_word_embeddings", default=False),
        "activation": ACTIVATIONS[activation],
        **rope_fields(values, family),
        "norm_eps": values.number("rms_norm_eps", 1e-5 if family in ("mixtral", "gpt_oss", "glm4_moe") else 1e-6),
    }


def _name(values: HfValues, family: str) -> str:
    """The checkpoint's own name, else that of its folder or file, else the family's."""
    path = PurePath(values.where)
    place = path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")
    return PurePath(values.text("_name_or_path", "")).name or place or family


FAMILIES: dict[str, Callable[[HfValues], dict[str, Any]]] = {
    "deepseek_v2": hf_families.deepseek_v2,
    "deepseek_v3": hf_families.deepseek_v3,  # Moonlight too
    "glm4_moe": hf_families.glm4_moe,
    "gpt_oss": hf_families.gpt_oss,
    "kimi_k2": hf_families.deepseek_v3,
    "llama": hf_families.llama,
    "mixtral": hf_families.mixtral,
    "nemotron_h": hf_nemotron.fields,  # Nemotron 3 too
    "qwen2": hf_families.qwen2,
    "qwen2_moe": hf_families.qwen2_moe,
    "qwen3": hf_families.qwen3,
    "qwen3_5_moe": hf_families.qwen3_5_moe,
    "qwen3_5_moe_text": hf_families.qwen3_5_moe,
    "qwen3_moe": hf_families.qwen3_moe,
    "qwen3_next": hf_families.qwen3_next,
}
