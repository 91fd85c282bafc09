"""Parameter counts by component, exact, as published models count them (embedding and head included, MTP apart)."""

from dataclasses import dataclass

from moeplan.mixers import GatedDeltaNet, GqaAttention, LinearMixer, Mamba2, MlaAttention
from moeplan.model_spec import MOE_LAYER, LayerKind, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Elements of one layer. ``expert`` is one routed expert; ``norms`` all norm weights.

    ``latent``: the projections to and from the width that experts work in.
    """

    attention: int
    linear_mixer: int
    norms: int
    dense_mlp: int
    router: int
    latent: int
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
        mixers = self.attention + self.linear_mixer
        return mixers + self.norms + self.dense_mlp + self.router + self.latent + self.shared_expert

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
    gate = query_size * attention.output_gate
    weights = hidden * (query_size + gate + 2 * kv_size) + query_size * hidden
    biases = (query_size + gate + 2 * kv_size) * attention.qkv_bias + hidden * attention.out_bias
    return weights + biases + heads * attention.sinks


def linear_mixer_parameters(model: ModelSpec) -> int:
    """Projections, convolution and per-head scalars of one linear mixer; its gated norm is counted as a norm."""
    mixer, hidden = model.linear_mixer, model.hidden_size
    if mixer is None:
        return 0
    weights = hidden * linear_mixer_projection(mixer) + mixer.conv_size * mixer.conv_kernel + mixer.inner_size * hidden
    if isinstance(mixer, Mamba2):  # the convolution's bias; decay, skip and time step of a head
        return weights + mixer.conv_size + 3 * mixer.num_heads
    return weights + 2 * mixer.num_v_heads


def linear_mixer_projection(mixer: LinearMixer) -> int:
    """Columns of the input projection: what the convolution takes, the gate, and the scalars of a head."""
    scalars = mixer.num_heads if isinstance(mixer, Mamba2) else 2 * mixer.num_v_heads
    return mixer.conv_size + mixer.inner_size + scalars


def norm_parameters(model: ModelSpec, kind: LayerKind) -> int:
    """Norm weights of one layer: of width hidden before each block, and those inside attention or linear mixer."""
    inner = 0
    if kind.mixer == "attention":
        inner = _attention_norms(model)
    elif kind.mixer == "linear":
        mixer = model.linear_mixer
        inner = mixer.v_head_dim if isinstance(mixer, GatedDeltaNet) else mixer.inner_size if mixer else 0
    return model.hidden_size * ((kind.mixer != "none") + (kind.mlp != "none")) + inner


def _attention_norms(model: ModelSpec) -> int:
    attention = model.attention
    if isinstance(attention, GqaAttention):
        return 2 * attention.head_dim if attention.qk_norm else 0
    return attention.q_lora_rank + attention.kv_lora_rank


def layer_parameters(model: ModelSpec, kind: LayerKind) -> LayerParameters:
    """Counts of one layer of the given kind."""
    hidden, matrices, moe = model.hidden_size, model.mlp_matrices, model.moe
    has_experts = moe is not None and kind.mlp == "moe"
    bias = moe.mlp_bias * ((matrices - 1) * moe.expert_ffn_size + model.expert_hidden_size) if moe else 0
    return LayerParameters(
        attention=attention_parameters(model) if kind.mixer == "attention" else 0,
        linear_mixer=linear_mixer_parameters(model) if kind.mixer == "linear" else 0,
        norms=norm_parameters(model, kind),
        dense_mlp=matrices * hidden * model.dense_ffn_size if kind.mlp == "dense" else 0,
        router=hidden * moe.num_experts + moe.num_experts * moe.mlp_bias if moe and has_experts else 0,
        latent=2 * hidden * moe.latent_size if moe and has_experts else 0,
        shared_expert=matrices * hidden * moe.shared_ffn_size + hidden * moe.shared_gate if moe and has_experts else 0,
        expert=matrices * model.expert_hidden_size * moe.expert_ffn_size + bias if moe and has_experts else 0,
        num_experts=moe.num_experts if moe and has_experts else 0,
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
    depths = min(model.num_mtp_layers, 1) if model.mtp_shared else model.num_mtp_layers
    return layers + heads + model.hidden_size + depths * mtp * with_mtp


def active_parameters(model: ModelSpec) -> int:
    """Elements that take part in one token's forward pass, embedding and head included."""
    idle = 0
    if model.moe is not None:
        expert = layer_parameters(model, MOE_LAYER).expert
        idle = model.num_moe_layers * expert * (model.moe.num_experts - model.moe.top_k)
    return total_parameters(model) - idle
