"""Configs that are written read back as the same model; models that no family holds are refused."""

import pytest

from moeplan.errors import InvalidInputError
from moeplan.hf_config import model_from_hf_config
from moeplan.hf_export import ARCHITECTURES, hf_config_of
from moeplan.hf_layout import hf_weight_name
from moeplan.mixers import GqaAttention
from moeplan.model_spec import ModelSpec
from moeplan.presets import load_model, model_names

FAMILIES = {
    "llama3-8b": "llama",
    "qwen2.5-7b": "qwen2",
    "qwen3-8b": "qwen3",
    "mixtral-8x7b": "mixtral",
    "h200-coarse": "mixtral",
    "h200-fine": "mixtral",
    "qwen3-30b-a3b": "qwen3_moe",
    "qwen2-57b-a14b": "qwen2_moe",
    "qwen3-next-80b-a3b": "qwen3_next",
    "deepseek-v2-lite": "deepseek_v2",
    "moonlight-16b-a3b": "deepseek_v3",
    "nemotron3-nano-30b-a3b": "nemotron_h",
    "nemotron3-ultra-550b-a55b": "nemotron_h",
}


@pytest.mark.parametrize("name,family", FAMILIES.items())
def test_a_preset_comes_back_from_its_config(name: str, family: str) -> None:
    model = load_model(name)
    config = hf_config_of(model)
    assert config["model_type"] == family
    assert config["architectures"] == [ARCHITECTURES[family]]
    back = model_from_hf_config(config, "config.json")
    for field in ("num_layers", "hidden_size", "vocab_size", "attention", "num_dense_layers", "tied_embeddings"):
        assert getattr(back, field) == getattr(model, field), field
    if model.moe is not None and back.moe is not None:
        kept = ("num_experts", "top_k", "expert_ffn_size", "shared_ffn_size", "shared_gate")
        assert [getattr(back.moe, key) for key in kept] == [getattr(model.moe, key) for key in kept]


def _difference(name: str) -> str:
    """What keeps a preset out of every family; empty where one holds it."""
    try:
        hf_config_of(load_model(name))
    except InvalidInputError as error:
        return error.message
    return ""


def test_presets_of_no_family_are_these() -> None:
    out = {name: reason for name in model_names() if (reason := _difference(name))}
    # GPT-3 and Nemotron-4 have no gate, Grok-1 and Llama 4 other routers, tiny-moe a shared expert without gate.
    families = ("gpt3", "nemotron4", "grok1", "llama4", "tiny-moe")
    assert {name for name in out if not name.startswith(families)} == set()
    assert "normalize_top_k would differ" in out["grok1-314b"]


def test_a_model_of_no_family_is_refused_with_the_difference() -> None:
    model = ModelSpec(
        name="odd",
        num_layers=2,
        hidden_size=64,
        vocab_size=128,
        dense_ffn_size=128,
        activation="squared_relu",
        attention=GqaAttention(num_heads=4, num_kv_heads=4, head_dim=16),
    )
    with pytest.raises(InvalidInputError, match="no Hugging Face family holds model odd"):
        hf_config_of(model)
    biased = model.model_copy(
        update={
            "activation": "swiglu",
            "attention": GqaAttention(num_heads=4, num_kv_heads=4, head_dim=16, out_bias=True),
        }
    )
    with pytest.raises(InvalidInputError, match=r"nearest is llama, where attention\.qkv_bias would differ"):
        hf_config_of(biased)


@pytest.mark.parametrize(
    "name,preset,theirs",
    [
        ("embedding.weight", "qwen3-8b", "model.embed_tokens.weight"),
        ("layers.3.attention.query_norm.weight", "qwen3-8b", "model.layers.3.self_attn.q_norm.weight"),
        ("layers.0.experts.7.gate.weight", "mixtral-8x7b", "model.layers.0.block_sparse_moe.experts.7.w1.weight"),
        ("layers.0.router.weight", "mixtral-8x7b", "model.layers.0.block_sparse_moe.gate.weight"),
        ("layers.1.experts.7.down.weight", "qwen3-30b-a3b", "model.layers.1.mlp.experts.7.down_proj.weight"),
        ("layers.1.attention.query_up.weight", "deepseek-v2-lite", "model.layers.1.self_attn.q_proj.weight"),
        ("layers.1.attention.key_value_up.weight", "moonlight-16b-a3b", "model.layers.1.self_attn.kv_b_proj.weight"),
        ("layers.1.shared_expert.up.weight", "moonlight-16b-a3b", "model.layers.1.mlp.shared_experts.up_proj.weight"),
    ],
)  # fmt: skip
def test_weights_have_the_names_of_their_family(name: str, preset: str, theirs: str) -> None:
    model = load_model(preset)
    assert hf_weight_name(name, model, hf_config_of(model)["model_type"]) == theirs
