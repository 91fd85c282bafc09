"""Every weight of a model by name, whole: what the parameters of any folding are parts of.

Matrices are [out, in] but for routed experts, which are [in, out], as a grouped GEMM takes them.
"""

from collections.abc import Iterator

from moeplan.mixers import MlaAttention
from moeplan.model_spec import ModelSpec

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def weight_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes by name, with the selection biases of routers, which are no parameters (``...router.expert_bias``)."""
    return dict(_weights(model))


def _weights(model: ModelSpec) -> Shapes:
    hidden = model.hidden_size
    yield "embedding.weight", (model.vocab_size, hidden)
    if not model.tied_embeddings:
        yield "head.weight", (model.vocab_size, hidden)
    yield "final_norm.weight", (hidden,)
    kinds = [*model.layer_kinds, *[model.mtp_kind] * model.num_mtp_layers]
    for layer, kind in enumerate(kinds):
        name = f"layers.{layer}"
        if layer >= model.num_layers:
            yield f"{name}.projection.weight", (hidden, 2 * hidden)
            for norm in ("embedding_norm", "hidden_norm", "final_norm"):
                yield f"{name}.{norm}.weight", (hidden,)
        yield f"{name}.attention_norm.weight", (hidden,)
        yield f"{name}.mlp_norm.weight", (hidden,)
        yield from _attention(model, f"{name}.attention")
        if kind.mlp == "dense":
            yield from _mlp(model, f"{name}.mlp", model.dense_ffn_size)
        else:
            yield from _experts(model, name)


def _attention(model: ModelSpec, name: str) -> Shapes:
    hidden, attention = model.hidden_size, model.attention
    yield f"{name}.output.weight", (hidden, attention.num_heads * attention.v_head_dim)
    if isinstance(attention, MlaAttention):
        yield from _latent(attention, hidden, name)
        return
    if attention.out_bias:
        yield f"{name}.output.bias", (hidden,)
    if attention.sinks:
        yield f"{name}.sinks", (attention.num_heads,)
    kv = attention.num_kv_heads
    for part, num in (("query", attention.num_heads), ("key", kv), ("value", kv)):
        yield f"{name}.{part}.weight", (num * attention.head_dim, hidden)
        if attention.qkv_bias:
            yield f"{name}.{part}.bias", (num * attention.head_dim,)
    if attention.qk_norm:
        yield f"{name}.query_norm.weight", (attention.head_dim,)
        yield f"{name}.key_norm.weight", (attention.head_dim,)


def _latent(attention: MlaAttention, hidden: int, name: str) -> Shapes:
    heads, q_rank, kv_rank = attention.num_heads, attention.q_lora_rank, attention.kv_lora_rank
    if q_rank:
        yield f"{name}.query_down.weight", (q_rank, hidden)
        yield f"{name}.query_norm.weight", (q_rank,)
    yield f"{name}.query_up.weight", (heads * attention.qk_head_dim, q_rank or hidden)
    yield f"{name}.key_value_down.weight", (kv_rank + attention.qk_rope_head_dim, hidden)
    yield f"{name}.key_value_norm.weight", (kv_rank,)
    yield f"{name}.key_value_up.weight", (heads * (attention.qk_nope_head_dim + attention.v_head_dim), kv_rank)


def _mlp(model: ModelSpec, name: str, width: int) -> Shapes:
    for part in _inputs(model):
        yield f"{name}.{part}.weight", (width, model.hidden_size)
    yield f"{name}.down.weight", (model.hidden_size, width)


def _inputs(model: ModelSpec) -> tuple[str, ...]:
    return ("gate", "up") if model.is_gated else ("up",)


def _experts(model: ModelSpec, name: str) -> Shapes:
    moe, hidden = model.moe, model.hidden_size
    assert moe is not None
    yield f"{name}.router.weight", (moe.num_experts, hidden)
    if moe.mlp_bias:
        yield f"{name}.router.bias", (moe.num_experts,)
    if moe.router.expert_bias:
        yield f"{name}.router.expert_bias", (moe.num_experts,)
    if moe.shared_ffn_size:
        yield from _mlp(model, f"{name}.shared_expert", moe.shared_ffn_size)
    if moe.shared_gate:
        yield f"{name}.shared_gate.weight", (1, hidden)
    width = moe.expert_ffn_size
    for expert in range(moe.num_experts):
        for part in _inputs(model):
            yield f"{name}.experts.{expert}.{part}.weight", (hidden, width)
            if moe.mlp_bias:
                yield f"{name}.experts.{expert}.{part}.bias", (width,)
        yield f"{name}.experts.{expert}.down.weight", (width, hidden)
        if moe.mlp_bias:
            yield f"{name}.experts.{expert}.down.bias", (hidden,)
