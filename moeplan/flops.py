"""Model FLOPs of a training token: the convention of every TFLOP/s figure in moeplan.

Three times forward, causal attention halved, MTP layers and every LM head counted; router, embedding, softmax,
permutation, recompute and optimizer not (report section 9.2). Two per multiply-add.
"""

from collections.abc import Sequence

from moeplan.mixers import GqaAttention, Mamba2, MlaAttention
from moeplan.model_spec import LayerKind, ModelSpec
from moeplan.parameters import linear_mixer_projection


def attention_linear_macs(model: ModelSpec) -> float:
    """Multiply-adds per token of the attention projections of one layer, low-rank ones with their norms."""
    hidden, attention = model.hidden_size, model.attention
    heads, width = attention.num_heads, attention.qk_head_dim
    if isinstance(attention, MlaAttention):
        q_rank, kv_rank = attention.q_lora_rank, attention.kv_lora_rank
        query = q_rank * (hidden + heads * width + 1) if q_rank else hidden * heads * width
        expand = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        return (
            query
            + kv_rank * (hidden + expand + 1)
            + hidden * attention.qk_rope_head_dim
            + heads * attention.v_head_dim * hidden
        )
    query_size, kv_size = heads * width, attention.num_kv_heads * width
    return hidden * (query_size + 2 * kv_size) + query_size * hidden


def linear_mixer_macs(model: ModelSpec) -> float:
    """Multiply-adds per token of one linear mixer: projections and the recurrence, whatever the sequence length.

    Of the recurrence Megatron counts 7 operations on each element of Mamba-2's state and 8 (with the convolution's) of
    the delta rule's. Its counter takes an inner width of twice the hidden size; here it is the model's own.
    """
    mixer, hidden = model.linear_mixer, model.hidden_size
    if mixer is None:
        return 0.0
    projections = hidden * (linear_mixer_projection(mixer) + mixer.inner_size)
    if isinstance(mixer, Mamba2):
        return projections + 3.5 * mixer.inner_size * mixer.state_size
    return (
        projections + mixer.conv_kernel * mixer.conv_size + 4 * mixer.num_v_heads * mixer.k_head_dim * mixer.v_head_dim
    )


def mixer_macs(
    model: ModelSpec, kind: LayerKind, layer: int | None, seq_len: float, packed_lengths: Sequence[float] = ()
) -> float:
    """Multiply-adds per token of what mixes tokens in one layer."""
    if kind.mixer == "attention":
        return attention_linear_macs(model) + attention_core_macs(model, layer, seq_len, packed_lengths)
    return linear_mixer_macs(model) if kind.mixer == "linear" else 0.0


def mean_keys_per_token(
    model: ModelSpec, layer: int | None, seq_len: float, packed_lengths: Sequence[float] = ()
) -> float:
    """Keys a token attends to on average: half its document (causal), or the mean filled part of the window.

    ``layer`` None is an MTP layer: never windowed. A sequence packed with documents counts the sum of their L^2 / 2
    over the sum of their L (report sections 6 and 9.2); without ``packed_lengths`` it is one document.
    """
    documents = packed_lengths or (seq_len,)
    window = _window(model, layer)
    return sum(length * _mean_keys(length, window) for length in documents) / sum(documents)


def _window(model: ModelSpec, layer: int | None) -> int | None:
    attention = model.attention
    is_windowed = isinstance(attention, GqaAttention) and layer is not None and model.is_windowed(layer)
    return attention.sliding_window if is_windowed else None


def _mean_keys(length: float, window: int | None) -> float:
    if not window:
        return length / 2
    seen = min(window, length)
    return seen * (1 - seen / (2 * length))


def attention_core_macs(
    model: ModelSpec, layer: int | None, seq_len: float, packed_lengths: Sequence[float] = ()
) -> float:
    """Multiply-adds per token of QK^T and PV of one layer."""
    attention = model.attention
    width = attention.num_heads * (attention.qk_head_dim + attention.v_head_dim)
    return width * mean_keys_per_token(model, layer, seq_len, packed_lengths)


def attention_flops_by_window(model: ModelSpec) -> dict[int | None, float]:
    """Training FLOPs of attention per token and key, summed over the layers of each window (None: no window)."""
    attention = model.attention
    layer_flops = 6.0 * attention.num_heads * (attention.qk_head_dim + attention.v_head_dim)
    found: dict[int | None, float] = {}
    attending = [layer for layer, kind in enumerate(model.layer_kinds) if kind.mixer == "attention"]
    for layer in (*attending, *(None,) * model.num_mtp_layers):
        window = _window(model, layer)
        found[window] = found.get(window, 0.0) + layer_flops
    return found


def seen_keys(length: float, window: int | None) -> float:
    """Keys that all tokens of one document of ``length`` attend to, causally and inside the window."""
    return length * _mean_keys(length, window)


def mlp_macs(model: ModelSpec, kind: LayerKind) -> float:
    """Multiply-adds per token of the MLP or of the chosen and shared experts of one layer."""
    hidden, moe = model.hidden_size, model.moe
    if kind.mlp == "dense":
        return model.mlp_matrices * hidden * model.dense_ffn_size
    if kind.mlp == "none" or moe is None:
        return 0.0
    routed = model.expert_hidden_size * moe.top_k * moe.expert_ffn_size
    return model.mlp_matrices * (routed + hidden * moe.shared_ffn_size) + 2 * hidden * moe.latent_size


def training_flops_per_token(model: ModelSpec, seq_len: float, packed_lengths: Sequence[float] = ()) -> float:
    """Model FLOPs of one token in training (forward and backward) at sequence length ``seq_len``, perhaps packed.

    DeepSeek-V3 at 4096: 260.0e9 with its MTP layer, 249.8e9 without.
    """
    hidden, depth = model.hidden_size, model.num_mtp_layers
    layers: list[tuple[LayerKind, int | None]] = [(kind, index) for index, kind in enumerate(model.layer_kinds)]
    layers += [(model.mtp_kind, None)] * depth
    macs = sum(
        mixer_macs(model, kind, index, seq_len, packed_lengths) + mlp_macs(model, kind) for kind, index in layers
    )
    macs += depth * (3 * hidden + 2 * hidden**2) + (1 + depth) * hidden * model.vocab_size
    return 6.0 * macs
