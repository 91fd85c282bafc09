"""Properties of any ModelSpec, random ones included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moeplan.flops import training_flops_per_token
from moeplan.mixers import GqaAttention, MlaAttention
from moeplan.model_spec import DENSE_LAYER, ModelSpec, Moe, Router
from moeplan.parameters import active_parameters, layer_parameters, total_parameters

SIZES = st.integers(1, 16).map(lambda n: 16 * n)
SEQ_LENS = st.integers(1, 65536)


@st.composite
def attentions(draw: st.DrawFn) -> GqaAttention | MlaAttention:
    if draw(st.booleans()):
        return MlaAttention(
            num_heads=draw(st.integers(1, 16)),
            q_lora_rank=draw(st.just(0) | SIZES),
            kv_lora_rank=draw(SIZES),
            qk_nope_head_dim=draw(SIZES),
            qk_rope_head_dim=draw(SIZES),
            v_head_dim=draw(SIZES),
        )
    kv_heads = draw(st.integers(1, 4))
    return GqaAttention(
        num_heads=kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_dim=draw(SIZES),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        sinks=draw(st.booleans()),
        sliding_window=draw(st.none() | st.integers(1, 4096)),
        sliding_period=draw(st.integers(1, 4)),
    )


@st.composite
def moes(draw: st.DrawFn) -> Moe:
    groups = draw(st.integers(1, 4))
    per_group = draw(st.integers(1, 8))
    chosen = draw(st.integers(1, groups))
    return Moe(
        num_experts=groups * per_group,
        top_k=draw(st.integers(1, chosen * per_group)),
        expert_ffn_size=draw(SIZES),
        shared_ffn_size=draw(st.just(0) | SIZES),
        shared_gate=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        router=Router(num_groups=groups, top_groups=chosen),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    num_layers = draw(st.integers(1, 8))
    return ModelSpec(
        name="random",
        num_layers=num_layers,
        hidden_size=draw(SIZES),
        vocab_size=draw(SIZES),
        attention=draw(attentions()),
        dense_ffn_size=draw(SIZES),
        moe=draw(st.none() | moes()),
        num_dense_layers=draw(st.integers(0, num_layers)),
        moe_layer_period=draw(st.integers(1, 3)),
        num_mtp_layers=draw(st.integers(0, 2)),
        tied_embeddings=draw(st.booleans()),
        activation=draw(st.sampled_from(["swiglu", "geglu", "gelu", "squared_relu"])),
    )


@given(models())
def test_active_parameters_never_exceed_the_total(model: ModelSpec) -> None:
    active, total = active_parameters(model), total_parameters(model)
    assert 0 < active <= total <= total_parameters(model, with_mtp=True)
    routes_to_all = model.moe is None or model.moe.top_k == model.moe.num_experts
    assert (active == total) == (routes_to_all or not model.num_moe_layers)


@given(models(), SEQ_LENS, SEQ_LENS)
def test_flops_per_token_grow_with_the_sequence(model: ModelSpec, one: int, other: int) -> None:
    if one == other:
        other += 1
    short, long = sorted((one, other))
    assert training_flops_per_token(model, short) < training_flops_per_token(model, long)


@given(models(), SEQ_LENS)
def test_a_layer_more_costs_flops_and_parameters(model: ModelSpec, seq_len: int) -> None:
    deeper = ModelSpec.model_validate(model.model_dump() | {"num_layers": model.num_layers + 1})
    assert training_flops_per_token(deeper, seq_len) > training_flops_per_token(model, seq_len)
    added = layer_parameters(deeper, deeper.layer_kinds[-1]).total
    assert total_parameters(deeper) == total_parameters(model) + added


@given(models())
def test_a_model_survives_json(model: ModelSpec) -> None:
    assert ModelSpec.model_validate_json(model.model_dump_json()) == model


@pytest.mark.parametrize(
    "change, message",
    [
        ({"attention": {"kind": "gqa", "num_heads": 6, "num_kv_heads": 4, "head_dim": 8}}, "not a multiple"),
        ({"moe": {"num_experts": 4, "top_k": 5, "expert_ffn_size": 8}}, "top_k 5 exceeds num_experts 4"),
        ({"dense_ffn_size": 0}, "need dense_ffn_size"),
        ({"layer_pattern": "**", "dense_ffn_size": 0, "num_mtp_layers": 1}, "need dense_ffn_size"),
        ({"num_dense_layers": 3}, "num_dense_layers 3 exceeds num_layers 2"),
        ({"layer_pattern": "*-*"}, "3 symbols for 2 layers"),
        ({"layer_pattern": "*X"}, r"'X'; its symbols are M \* - E"),
        ({"layer_pattern": "*-", "attention_period": 2}, "leave out periods"),
        ({"layer_pattern": "*E"}, "need moe"),
        ({"layer_pattern": "M-"}, "linear_mixer goes with layers that run it"),
        ({"linear_mixer": {"kind": "mamba2", "num_heads": 3, "head_dim": 8, "state_size": 8}}, "goes with layers"),
        ({"mtp_shared": True}, "mtp_shared goes with num_mtp_layers"),
        ({"colour": "red"}, "Extra inputs"),
    ],
)
def test_impossible_models_are_refused(change: dict[str, object], message: str) -> None:
    attention = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    fields = {"name": "m", "num_layers": 2, "hidden_size": 32, "vocab_size": 64, "dense_ffn_size": 64}
    base: dict[str, object] = {**fields, "attention": attention}
    assert ModelSpec.model_validate(base).layer_kinds == (DENSE_LAYER,) * 2
    with pytest.raises(ValidationError, match=message):
        ModelSpec.model_validate(base | change)


def test_a_model_of_mixers_alone_needs_no_width_of_an_mlp() -> None:
    attention = GqaAttention(num_heads=4, num_kv_heads=2, head_dim=8)
    model = ModelSpec(name="m", num_layers=2, hidden_size=32, vocab_size=64, attention=attention, layer_pattern="**")
    # A norm, queries, keys, values and the way out in each layer; embedding, head and the last norm.
    assert total_parameters(model) == 2 * (32 + 32 * (32 + 2 * 16) + 32 * 32) + 2 * 64 * 32 + 32
