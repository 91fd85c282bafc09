"""Parameter counts by component, exact, as published models count them (embedding and head included, MTP apart)."""

from dataclasses import dataclass

from moeplan.model_spec import GqaAttention, LayerKind, MlaAttention, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Elements of one layer. ``expert`` is one routed expert; ``norms`` all norm weights."""

    attention: int
    norms: int
    dense_mlp: int
    router: int
    shared_expert: int
    expert: int
    num_experts: int

    @property
    def experts(self) -> int:
        """All routed experts."""
        return self.expert * self.num_experts

    @property
    def dense(self) -> int:
        """Everything outside the routed experts."""
        return self.attention + self.norms + self.dense_mlp + self.router + self.shared_expert

    @property
    def total(self) -> int:
        return self.dense + self.experts


def attention_parameters(model: ModelSpec) -> int:
    """Projection weights (and biases, sinks) of one attention block; its inner norms are counted as norms."""
    hidden, attention = model.hidden_size, model.attention
    heads, width = attention.num_heads, attention.qk_head_dim
    if isinstance(attention, MlaAttention):
        q_rank, kv_rank = attention.q_lora_rank, attention.kv_lora_rank
        query = q_rank * (hidden + heads * width) if q_rank else hidden * heads * width
        compress = hidden * (kv_rank + attention.qk_rope_head_dim)
        expand = kv_rank * heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        return query + compress + expand + heads * attention.v_head_dim * hidden
    query_size, kv_size = heads * width, attention.num_kv_heads * width
    weights = hidden * (query_size + 2 * kv_size) + query_size * hidden
    biases = (query_size + 2 * kv_size) * attention.qkv_bias + hidden * attention.out_bias
    return weights + biases + heads * attention.sinks


def norm_parameters(model: ModelSpec) -> int:
    """Norm weights of one layer: two of width hidden, and those inside attention."""
    attention = model.attention
    if isinstance(attention, GqaAttention):
        inner = 2 * attention.head_dim if attention.qk_norm else 0
    else:
        inner = attention.q_lora_rank + attention.kv_lora_rank
    return 2 * model.hidden_size + inner


def layer_parameters(model: ModelSpec, kind: LayerKind) -> LayerParameters:
    """Counts of one layer of the given kind."""
    hidden, matrices = model.hidden_size, model.mlp_matrices
    attention, norms = attention_parameters(model), norm_parameters(model)
    moe = model.moe
    if kind == "dense" or moe is None:
        return LayerParameters(attention, norms, matrices * hidden * model.dense_ffn_size, 0, 0, 0, 0)
    ffn = moe.expert_ffn_size
    bias = moe.mlp_bias * ((matrices - 1) * ffn + hidden)
    return LayerParameters(
        attention=attention,
        norms=norms,
        dense_mlp=0,
        router=hidden * moe.num_experts + moe.num_experts * moe.mlp_bias,
        shared_expert=matrices * hidden * moe.shared_ffn_size + hidden * moe.shared_gate,
        expert=matrices * hidden * ffn + bias,
        num_experts=moe.num_experts,
    )


def embedding_parameters(model: ModelSpec) -> int:
    """Elements of the token embedding; the head has as many unless tied."""
    return model.vocab_size * model.hidden_size


def mtp_extra_parameters(model: ModelSpec) -> int:
    """Elements of one MTP depth beside its layer: the projection of two hidden states to one, and three norms."""
    return 2 * model.hidden_size**2 + 3 * model.hidden_size


def total_parameters(model: ModelSpec, *, with_mtp: bool = False) -> int:
    """All elements; MTP depths (which share embedding and head) only on request."""
    layers = sum(layer_parameters(model, kind).total for kind in model.layer_kinds)
    heads = embedding_parameters(model) * (1 if model.tied_embeddings else 2)
    mtp = layer_parameters(model, model.mtp_kind).total + mtp_extra_parameters(model)
    return layers + heads + model.hidden_size + model.num_mtp_layers * mtp * with_mtp


def active_parameters(model: ModelSpec) -> int:
    """Elements that take part in one token's forward pass, embedding and head included."""
    idle = 0
    if model.moe is not None:
        layer = layer_parameters(model, "moe")
        idle = model.layer_kinds.count("moe") * layer.expert * (model.moe.num_experts - model.moe.top_k)
    return total_parameters(model) - idle
