"""Rotary embedding in a Hugging Face config: base, scaling, and how much of a head is rotated.

Releases before 5 of transformers write ``rope_theta`` and ``rope_scaling``, later ones both into ``rope_parameters``.
"""

from typing import Any

from moeplan.hf_values import HfValues
from moeplan.model_spec import Llama3Scaling, ModelSpec

DEFAULT_THETA = {"mixtral": 1e6, "gpt_oss": 150_000.0}
# What GPT-OSS's class has where a config says nothing.
_GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def rope_fields(values: HfValues, family: str) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` of ModelSpec; a kind of scaling that it cannot hold is an error."""
    rope, key = _rope(values)
    theta = rope.number("rope_theta", values.number("rope_theta", DEFAULT_THETA.get(family, 10_000.0)))
    if family == "gpt_oss" and not any(name in values for name in ("rope_parameters", "rope_scaling")):
        rope = HfValues(_GPT_OSS, values.where)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind not in ("yarn", "llama3"):
        values.refuse(key, f"is of type {kind!r}; default, yarn and llama3 can be imported")
    original = "original_max_position_embeddings"
    scaling: dict[str, Any] = {
        "kind": kind,
        "factor": rope.number("factor"),
        "original_max_positions": (rope if original in rope else values).integer(
            original if original in rope else "max_position_embeddings"
        ),
    }
    if kind == "llama3":
        scaling |= {name: rope.number(name) for name in ("low_freq_factor", "high_freq_factor")}
        return {"rope_theta": theta, "rope_scaling": scaling}
    names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    scaling |= {name: rope.number(name) for name in names if name in rope}
    return {"rope_theta": theta, "rope_scaling": scaling | {"truncate": rope.flag("truncate", default=True)}}


def rotary_factor(values: HfValues, default: float) -> float:
    """Rotated part of a head."""
    rope, _ = _rope(values)
    return rope.number("partial_rotary_factor", values.number("partial_rotary_factor", default))


def _rope(values: HfValues) -> tuple[HfValues, str]:
    """The object that counts: where both are there, transformers takes ``rope_scaling``, which users add by hand."""
    found = {key: values.inner(key) for key in ("rope_parameters", "rope_scaling")}
    for key, rope in found.items():
        if any(kind in rope for kind in ("full_attention", "sliding_attention")):
            values.refuse(key, "differs by kind of layer; one for all layers can be imported")
    added = found["rope_scaling"]
    is_added = "rope_type" in added or "type" in added
    key = "rope_parameters" if "rope_parameters" in values and not is_added else "rope_scaling"
    return found[key], key


def rope_config(model: ModelSpec) -> dict[str, Any]:
    """The keys of a config that say the same, for every release of transformers."""
    scaling = model.rope_scaling
    config: dict[str, Any] = {"rope_theta": model.rope_theta}
    if scaling is None:
        return config
    values = scaling.model_dump(exclude={"kind", "original_max_positions"}, exclude_none=True)
    zero = [name for name in ("mscale", "mscale_all_dim") if values.get(name) == 0]
    values = {name: value for name, value in values.items() if name not in zero}
    values |= {"original_max_position_embeddings": scaling.original_max_positions, "rope_type": scaling.kind}
    extended = scaling.factor * scaling.original_max_positions
    if not isinstance(scaling, Llama3Scaling):
        values["type"] = scaling.kind  # what DeepSeek's own code reads
    return config | {"rope_scaling": values, "max_position_embeddings": round(extended)}
