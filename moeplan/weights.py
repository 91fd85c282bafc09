"""Every weight of a model by name, whole: what the parameters of any folding are parts of.

Matrices are [out, in] but for routed experts, which are [in, out], as a grouped GEMM takes them.
"""

from collections.abc import Iterator

from moeplan.mixers import GatedDeltaNet, Mamba2, MlaAttention
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
    depths = min(model.num_mtp_layers, 1) if model.mtp_shared else model.num_mtp_layers
    kinds = [*model.layer_kinds, *[model.mtp_kind] * depths]
    for layer, kind in enumerate(kinds):
        name = f"layers.{layer}"
        if layer >= model.num_layers:
            yield f"{name}.projection.weight", (hidden, 2 * hidden)
            for norm in ("embedding_norm", "hidden_norm", "final_norm"):
                yield f"{name}.{norm}.weight", (hidden,)
        if kind.mixer == "attention":
            yield f"{name}.attention_norm.weight", (hidden,)
            yield from _attention(model, f"{name}.attention")
        elif kind.mixer == "linear":
            yield f"{name}.mixer_norm.weight", (hidden,)
            yield from _linear_mixer(model, f"{name}.mixer")
        if kind.mlp != "none":
            yield f"{name}.mlp_norm.weight", (hidden,)
        if kind.mlp == "dense":
            yield from _mlp(model, f"{name}.mlp", model.dense_ffn_size)
        elif kind.mlp == "moe":
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
    gates = (("gate", attention.num_heads),) if attention.output_gate else ()
    for part, num in (("query", attention.num_heads), ("key", kv), ("value", kv), *gates):
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


def _linear_mixer(model: ModelSpec, name: str) -> Shapes:
    hidden, mixer = model.hidden_size, model.linear_mixer
    assert mixer is not None
    yield f"{name}.output.weight", (hidden, mixer.inner_size)
    if isinstance(mixer, Mamba2):
        yield from _mamba(mixer, hidden, name)
    else:
        yield from _delta_net(mixer, hidden, name)


def _delta_net(mixer: GatedDeltaNet, hidden: int, name: str) -> Shapes:
    keys, values, heads = mixer.num_k_heads * mixer.k_head_dim, mixer.inner_size, mixer.num_v_heads
    for part, width in (("query", keys), ("key", keys), ("value", values), ("gate", values)):
        yield f"{name}.{part}.weight", (width, hidden)
        if part != "gate":
            yield f"{name}.{part}_conv.weight", (width, mixer.conv_kernel)
    yield f"{name}.beta.weight", (heads, hidden)
    yield f"{name}.time_step.weight", (heads, hidden)
    yield f"{name}.time_step.bias", (heads,)
    yield f"{name}.log_decay", (heads,)
    yield f"{name}.norm.weight", (mixer.v_head_dim,)


def _mamba(mixer: Mamba2, hidden: int, name: str) -> Shapes:
    """Named as the dual form of attention has it: what the papers call x, B and C are values, keys and queries."""
    heads, shared = mixer.num_heads, mixer.num_groups * mixer.state_size
    for part, width in (("gate", mixer.inner_size), ("value", mixer.inner_size), ("key", shared), ("query", shared)):
        yield f"{name}.{part}.weight", (width, hidden)
        if part != "gate":
            yield f"{name}.{part}_conv.weight", (width, mixer.conv_kernel)
            yield f"{name}.{part}_conv.bias", (width,)
    yield f"{name}.time_step.weight", (heads, hidden)
    yield f"{name}.time_step.bias", (heads,)
    yield f"{name}.log_rate", (heads,)
    yield f"{name}.skip", (heads,)
    yield f"{name}.norm.weight", (mixer.inner_size,)


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
    if moe.latent_size:
        yield f"{name}.latent_down.weight", (moe.latent_size, hidden)
        yield f"{name}.latent_up.weight", (hidden, moe.latent_size)
    rows, width = model.expert_hidden_size, moe.expert_ffn_size
    for expert in range(moe.num_experts):
        for part in _inputs(model):
            yield f"{name}.experts.{expert}.{part}.weight", (rows, width)
            if moe.mlp_bias:
                yield f"{name}.experts.{expert}.{part}.bias", (width,)
        yield f"{name}.experts.{expert}.down.weight", (width, rows)
        if moe.mlp_bias:
            yield f"{name}.experts.{expert}.down.bias", (rows,)
