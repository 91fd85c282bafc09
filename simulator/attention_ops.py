"""Forward ops of the attention block: grouped-query and multi-head latent attention.

Projections see the tokens of the tensor-parallel group and split their width; norms and residuals see a rank's own
tokens (Megatron's sequence parallelism). Context parallelism splits the sequence; keys and values pass in a ring.
"""

from dataclasses import replace

from moeplan.flops import mean_keys_per_token
from moeplan.model_spec import GqaAttention, MlaAttention
from moeplan.simulator.layer_builder import NORM_BACKWARD, LayerBuilder
from moeplan.simulator.op import Op
from moeplan.vocabulary import RecomputeModule


def attention_ops(build: LayerBuilder, layer: int) -> list[Op]:
    """Forward ops of the attention block of decoder layer ``layer``, its norm and residual included."""
    model, shape = build.model, build.shape
    attention, hidden, tokens = model.attention, model.hidden_size, shape.gathered_tokens
    width = attention.num_heads * attention.v_head_dim / shape.tp
    project = _mla_projections if isinstance(attention, MlaAttention) else _gqa_projections
    return [
        build.memory("input_norm", 2 * shape.own_tokens * hidden, NORM_BACKWARD, modules=("layernorm",)),
        *project(build),
        *_attention_core(build, layer),
        *build.quantize("out_proj.quantize", tokens * width, "elementwise", "before", "attention"),
        build.gemm("out_proj", (tokens, hidden, width), after=_core_names(build)),
        *build.tp_collective("reduce_scatter", "attention_reduce_scatter", hidden),
        build.memory("attention_residual", 3 * shape.own_tokens * hidden, 1 / 3),
    ]


def _core_names(build: LayerBuilder) -> tuple[str, ...] | None:
    return ("attention_core", "cp_exchange") if build.shape.cp > 1 else None


def _gqa_projections(build: LayerBuilder) -> list[Op]:
    attention = build.model.attention
    assert isinstance(attention, GqaAttention)
    hidden, tokens, tp = build.model.hidden_size, build.shape.gathered_tokens, build.shape.tp
    qk_width = (attention.num_heads + attention.num_kv_heads) * attention.head_dim / tp
    qkv_width = qk_width + attention.num_kv_heads * attention.head_dim / tp
    ops = [
        *build.tp_collective("all_gather", "attention_all_gather", hidden),
        *build.quantize("qkv_proj.quantize", tokens * hidden, "elementwise", "before", "attention"),
        build.gemm("qkv_proj", (tokens, qkv_width, hidden)),
    ]
    if attention.qk_norm:
        ops.append(build.memory("qk_norm", 2 * tokens * qk_width, NORM_BACKWARD))
    return [*ops, build.memory("rope", 2 * tokens * qk_width, 1.0)]


def _mla_projections(build: LayerBuilder) -> list[Op]:
    """Down projections see own tokens (they are not split); the compressed vectors are gathered over tp."""
    attention = build.model.attention
    assert isinstance(attention, MlaAttention)
    hidden, shape = build.model.hidden_size, build.shape
    tokens, own, heads = shape.gathered_tokens, shape.own_tokens, attention.num_heads / shape.tp
    q_rank, kv_rank, qk = attention.q_lora_rank, attention.kv_lora_rank, attention.qk_head_dim
    kv_width = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    up: tuple[RecomputeModule, ...] = ("mla_up_proj",)
    ops = build.quantize("mla_down.quantize", own * hidden, "elementwise", "before", "attention")
    if q_rank:
        ops.append(build.gemm("q_down", (own, q_rank, hidden)))
    ops += [
        build.gemm("kv_down", (own, kv_rank + attention.qk_rope_head_dim, hidden)),
        build.memory("latent_norm", 2 * own * (q_rank + kv_rank), NORM_BACKWARD, modules=up),
        *build.tp_collective(
            "all_gather", "latent_all_gather", (q_rank or hidden) + kv_rank + attention.qk_rope_head_dim
        ),
        build.gemm("q_up", (tokens, heads * qk, q_rank or hidden), modules=up),
        build.gemm("kv_up", (tokens, kv_width, kv_rank), modules=up),
        # Query and key are rewritten with their rotated part, the key from its latent and rotary halves.
        build.memory("rope", 4 * tokens * heads * qk, 1.0, modules=up),
    ]
    return ops


def _attention_core(build: LayerBuilder, layer: int) -> list[Op]:
    """QK, softmax, PV; with cp a ring passes keys and values meanwhile (report section 6)."""
    model, shape = build.model, build.shape
    attention, tokens = model.attention, shape.gathered_tokens
    heads, qk, v = attention.num_heads / shape.tp, attention.qk_head_dim, attention.v_head_dim
    keys = mean_keys_per_token(model, layer, shape.seq_len)
    kv_heads = attention.num_kv_heads / shape.tp
    moved = tokens * (heads * (qk + v) + kv_heads * (qk + v)) * shape.element_bytes
    core = Op(
        name="attention_core",
        kind="attention",
        family="attention",
        dtype=shape.format.gemm_dtype if shape.fp8_attention else shape.plain_dtype,
        rows=tokens,
        cols=heads,
        # The curves are by sequence length: a window of keys costs as a sequence of twice the mean keys seen, and
        # each ring step of cp works on its own part of the sequence.
        seq_len=2 * keys / shape.cp,
        qk_head_dim=qk,
        v_head_dim=v,
        flops=2 * tokens * heads * (qk + v) * keys,
        hbm_bytes=moved,
        backward_hbm_bytes=2 * moved,
        modules=frozenset(("core_attn",)),
    )
    if shape.cp == 1:
        return [core]
    steps = shape.cp - 1
    ring = Op(
        name="cp_exchange",
        kind="send_recv",
        family="cp_comm",
        stream="cp",
        comm_bytes=steps * tokens * kv_heads * (qk + v) * shape.element_bytes,
        group=shape.cp_group,
        num_kernels=steps,
        after=("rope",),
    )
    # The core starts with the keys it has, and the output projection waits for both.
    return [ring, replace(core, after=("rope",)) if build.stack.time.hides_cp else core]
