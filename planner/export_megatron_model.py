"""Megatron-LM's flags for an architecture."""

from collections.abc import Iterator

from moeplan.errors import InvalidInputError
from moeplan.layout import PipelineLayout
from moeplan.mixers import GqaAttention, Mamba2, MlaAttention
from moeplan.model_spec import Llama3Scaling, ModelSpec, Moe, Router, YarnScaling

Flag = tuple[str, ...]

_ACTIVATION_FLAGS: dict[str, tuple[Flag, ...]] = {
    "swiglu": (("swiglu",),),
    "squared_relu": (("squared-relu",),),
    "gelu": (),
}

# What its Mamba-2 layers have without a flag (megatron/core/ssm/mamba_mixer.py).
MAMBA_CHUNK, MAMBA_CONV = 128, 4

# What Megatron-LM takes for what its flags leave open.
_LLAMA3: dict[str, object] = {"original_max_positions": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN: dict[str, object] = {
    "original_max_positions": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "attention_factor": None,
}


def model_flags(model: ModelSpec, seq_len: int, layout: PipelineLayout) -> Iterator[Flag]:
    """Flags of all that ModelSpec says; a hybrid's pattern says the ``layout`` as well.

    Raises InvalidInputError for what Megatron-LM has no flag for.
    """
    if model.activation not in _ACTIVATION_FLAGS:
        raise _unknown("activation", model.activation, ", ".join(_ACTIVATION_FLAGS))
    if model.moe is not None and model.moe.mlp_bias:
        raise _unknown("moe.mlp_bias", True, "experts without biases")
    yield ("use-mcore-models",)
    yield "transformer-impl", "transformer_engine"
    yield from _layer_flags(model, layout)
    yield "hidden-size", str(model.hidden_size)
    if width := model.dense_ffn_size or (model.moe.expert_ffn_size if model.moe else 0):
        yield "ffn-hidden-size", str(width)
    yield from _ACTIVATION_FLAGS[model.activation]
    if model.activation == "squared_relu" and model.moe is not None:
        yield ("use-fused-weighted-squared-relu",)
    yield from _attention_flags(model)
    yield "position-embedding-type", "rope" if _is_rotary(model) else "none"
    yield "max-position-embeddings", str(seq_len)
    yield "normalization", "RMSNorm"
    yield "norm-epsilon", f"{model.norm_eps:g}"
    if not _has_biases(model):
        yield ("disable-bias-linear",)
    if not model.tied_embeddings:
        yield ("untie-embeddings-and-output-weights",)
    yield "tokenizer-type", "NullTokenizer"
    yield "vocab-size", str(model.vocab_size - 1)  # that tokenizer adds a token of its own
    yield "make-vocab-size-divisible-by", "1"
    if model.num_mtp_layers:
        if not model.layer_pattern:  # a pattern says it
            yield "mtp-num-layers", str(model.num_mtp_layers)
        if model.mtp_shared:
            yield ("mtp-use-repeated-layer",)
        yield "mtp-loss-scaling-factor", f"{model.mtp_loss_scaling_factor:g}"
    if model.moe is not None:
        yield from _moe_flags(model, model.moe)


def is_hybrid(model: ModelSpec) -> bool:
    """Whether Megatron-LM builds it from a pattern, by ``pretrain_hybrid.py``: layers of one block each."""
    return bool(model.layer_pattern)


def _layer_flags(model: ModelSpec, layout: PipelineLayout) -> Iterator[Flag]:
    """How many layers there are, or a symbol for each, and what the layers without attention are made of."""
    mixer = model.linear_mixer
    if is_hybrid(model):
        yield "hybrid-layer-pattern", _pattern(model, layout)
        yield "spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"
    else:
        yield "num-layers", str(model.num_layers)
    if isinstance(mixer, Mamba2):
        yield from _mamba_flags(model, mixer)
    elif mixer is not None:
        if is_hybrid(model):
            raise _unknown("layer_pattern", model.layer_pattern, f"attention_period for {mixer.kind}")
        yield "experimental-attention-variant", "gated_delta_net"
        yield "linear-attention-freq", str(model.attention_period)
        yield "linear-conv-kernel-dim", str(mixer.conv_kernel)
        yield "linear-key-head-dim", str(mixer.k_head_dim)
        yield "linear-value-head-dim", str(mixer.v_head_dim)
        yield "linear-num-key-heads", str(mixer.num_k_heads)
        yield "linear-num-value-heads", str(mixer.num_v_heads)


def _pattern(model: ModelSpec, layout: PipelineLayout) -> str:
    """Symbols of the decoder's layers, | between stages, then those of each MTP depth, which the last stage runs."""
    if model.num_mtp_layers and not layout.stages[-1].num_mtp == model.num_mtp_layers:
        raise InvalidInputError(
            f"layout: got {layout.text}, Megatron-LM runs MTP depths of a hybrid on the last stage, with the loss",
            "set a layout whose last stage holds every m and the L",
        )
    stages = [model.layer_pattern[stage.first_layer : stage.layers.stop] for stage in layout.stages]
    depth = "/*E" if model.moe is not None else "/*-"
    return "|".join(stages) + depth * model.num_mtp_layers


def _mamba_flags(model: ModelSpec, mixer: Mamba2) -> Iterator[Flag]:
    fixed = (mixer.chunk_size, mixer.conv_kernel)
    if not is_hybrid(model) or fixed != (MAMBA_CHUNK, MAMBA_CONV):
        allowed = f"mamba2 in a layer_pattern, chunk_size {MAMBA_CHUNK}, conv_kernel {MAMBA_CONV}"
        raise _unknown("linear_mixer", f"chunk_size {fixed[0]}, conv_kernel {fixed[1]}", allowed)
    yield "mamba-num-heads", str(mixer.num_heads)
    yield "mamba-head-dim", str(mixer.head_dim)
    yield "mamba-state-dim", str(mixer.state_size)
    yield "mamba-num-groups", str(mixer.num_groups)


def _is_rotary(model: ModelSpec) -> bool:
    return not isinstance(model.attention, GqaAttention) or model.attention.rotary


def _attention_flags(model: ModelSpec) -> Iterator[Flag]:
    attention = model.attention
    yield "num-attention-heads", str(attention.num_heads)
    if isinstance(attention, GqaAttention):
        if attention.num_kv_heads != attention.num_heads:
            yield ("group-query-attention",)
            yield "num-query-groups", str(attention.num_kv_heads)
        yield "kv-channels", str(attention.head_dim)
        if attention.rotary:
            yield "rotary-base", f"{model.rope_theta:g}"
        yield from ((name,) for name, is_on in _switches(attention).items() if is_on)
        if attention.sliding_window is not None:
            yield "window-size", f"{attention.sliding_window - 1},0"
            yield "window-attn-skip-freq", str(attention.sliding_period)
        if attention.sinks:
            yield "softmax-type", "learnable"
        if attention.rotary_dim:
            yield "rotary-percent", f"{attention.rotary_dim / attention.head_dim:g}"
    else:
        yield from _latent_flags(model, attention)
    yield from _rope_flags(model)


def _switches(attention: GqaAttention) -> dict[str, bool]:
    return {
        "qk-layernorm": attention.qk_norm,
        "add-qkv-bias": attention.qkv_bias and not attention.out_bias,
        "attention-output-gate": attention.output_gate,
    }


def _has_biases(model: ModelSpec) -> bool:
    """Whether every linear has a bias, as in GPT-3: Megatron-LM knows that, none, and biases of q, k and v alone."""
    attention = model.attention
    if not isinstance(attention, GqaAttention) or not attention.out_bias:
        return False
    if model.moe is not None or not attention.qkv_bias:
        raise _unknown("attention.out_bias", True, "with qkv_bias in a dense model")
    return True


def _latent_flags(model: ModelSpec, attention: MlaAttention) -> Iterator[Flag]:
    yield ("multi-latent-attention",)
    if attention.q_lora_rank:
        yield "q-lora-rank", str(attention.q_lora_rank)
    yield "kv-lora-rank", str(attention.kv_lora_rank)
    yield "qk-head-dim", str(attention.qk_nope_head_dim)
    yield "qk-pos-emb-head-dim", str(attention.qk_rope_head_dim)
    yield "v-head-dim", str(attention.v_head_dim)
    yield ("qk-layernorm",)
    yield "rotary-base", f"{model.rope_theta:g}"


def _rope_flags(model: ModelSpec) -> Iterator[Flag]:
    scaling = model.rope_scaling
    if isinstance(scaling, Llama3Scaling):
        _check_scaling(scaling, _LLAMA3)
        yield ("use-rope-scaling",)
        yield "rope-scaling-factor", f"{scaling.factor:g}"
    elif isinstance(scaling, YarnScaling):
        if not isinstance(model.attention, MlaAttention):
            raise _unknown("rope_scaling", "yarn", "yarn with latent attention")
        _check_scaling(scaling, _YARN)
        yield "rotary-scaling-factor", f"{scaling.factor:g}"
        yield "mscale", f"{scaling.mscale:g}"
        yield "mscale-all-dim", f"{scaling.mscale_all_dim:g}"
    elif isinstance(model.attention, MlaAttention):
        yield "rotary-scaling-factor", "1"


def _check_scaling(scaling: Llama3Scaling | YarnScaling, fixed: dict[str, object]) -> None:
    for key, value in fixed.items():
        if getattr(scaling, key) != value:
            raise _unknown(f"rope_scaling.{key}", getattr(scaling, key), f"{value}")


def _moe_flags(model: ModelSpec, moe: Moe) -> Iterator[Flag]:
    yield "num-experts", str(moe.num_experts)
    yield "moe-ffn-hidden-size", str(moe.expert_ffn_size)
    kinds = [int(kind.mlp == "moe") for kind in model.layer_kinds]
    if not all(kinds) and not is_hybrid(model):
        yield "moe-layer-freq", "[" + ",".join(map(str, kinds)) + "]"
    if moe.latent_size:
        yield "moe-latent-size", str(moe.latent_size)
    if moe.shared_ffn_size:
        yield "moe-shared-expert-intermediate-size", str(moe.shared_ffn_size)
    if moe.shared_gate:
        yield ("moe-shared-expert-gate",)
    yield "moe-router-topk", str(moe.top_k)
    yield from _router_flags(moe.router)


def _router_flags(router: Router) -> Iterator[Flag]:
    yield "moe-router-score-function", router.score_function
    yield "moe-router-dtype", "fp32"
    if router.num_groups > 1:
        yield "moe-router-num-groups", str(router.num_groups)
        yield "moe-router-group-topk", str(router.top_groups)
    if router.scaling_factor != 1:
        yield "moe-router-topk-scaling-factor", f"{router.scaling_factor:g}"
    if router.score_function == "softmax" and not router.normalize_top_k:
        yield ("moe-router-pre-softmax",)
    yield "moe-router-load-balancing-type", router.aux_loss
    if router.aux_loss != "none":
        yield "moe-aux-loss-coeff", f"{router.aux_loss_coeff:g}"
    if router.z_loss_coeff:
        yield "moe-z-loss-coeff", f"{router.z_loss_coeff:g}"
    if router.expert_bias:
        yield ("moe-router-enable-expert-bias",)
        yield "moe-router-bias-update-rate", f"{router.bias_update_rate:g}"


def _unknown(key: str, got: object, allowed: str) -> InvalidInputError:
    return InvalidInputError(f"model.{key}: got {got!r}, Megatron-LM's flags say: {allowed}", "train it with moeplan")
