"""Forward ops of the attention block: grouped-query and multi-head latent attention.

Projections see the tokens of the tensor-parallel group and split their width; norms and residuals see a rank's X
"""

from dataclasses import replace
from typing import Literal

from moeplan.flops import mean_keys_per_token
from moeplan.mixers import GqaAttention, MlaAttention
from moeplan.simulator.layer_builder import NORM_BACKWARD, LayerBuilder
from moeplan.simulator.op import Op
from moeplan.vocabulary import RecomputeModule


def attention_ops(build: LayerBuilder, layer: int) -> list[Op]:
    """Forward ops of the attention block of decoder layer ``layer``, its norm and residual included."""
    model, shape = build.model, build.shape
    attention, hidden, tokens = model.attention, model.hidden_size, shape.gathered_tokens
    width = attention.num_heads * attention.v_head_dim / shape.tp
    project = _mla_projections if isinstance(attention, MlaAttention) else _gqa_projections
    linear = build.of_module("attention")
    return [
        build.memory("input_norm", 2 * shape.own_tokens * hidden, NORM_BACKWARD, modules=("layernorm",)),
        *project(linear),
        *_attention_core(build, layer),
        *_output_gate(build),
        *linear.quantize("out_proj.quantize", (tokens * width, tokens * hidden), "elementwise", "before", "attention"),
        linear.gemm("out_proj", (tokens, hidden, width)),
        *build.tp_collective("reduce_scatter", "attention_reduce_scatter", hidden),
        build.memory("attention_residual", 3 * shape.own_tokens * hidden, 1 / 3),
    ]


def _gqa_projections(build: LayerBuilder) -> list[Op]:
    attention = build.model.attention
    assert isinstance(attention, GqaAttention)
    hidden, tokens, tp = build.model.hidden_size, build.shape.gathered_tokens, build.shape.tp
    qk_width = (attention.num_heads + attention.num_kv_heads) * attention.head_dim / tp
    gate_width = attention.num_heads * attention.head_dim / tp * attention.output_gate
    qkv_width = qk_width + gate_width + attention.num_kv_heads * attention.head_dim / tp
    ops = [
        *build.tp_collective("all_gather", "attention_all_gather", hidden),
        *build.quantize(
            "qkv_proj.quantize", (0, tokens * qkv_width), "elementwise", "before", "attention", normed=tokens * hidden
        ),
        build.gemm("qkv_proj", (tokens, qkv_width, hidden)),
    ]
    if attention.qk_norm:
        ops.append(build.memory("qk_norm", 2 * tokens * qk_width, NORM_BACKWARD))
    return [*ops, build.memory("rope", 2 * tokens * qk_width, 1.0)] if attention.rotary else ops


def _output_gate(build: LayerBuilder) -> list[Op]:
    """The sigmoid gate on the output: reads both, writes one; backward has a gradient more of each."""
    attention, tokens = build.model.attention, build.shape.gathered_tokens
    if not isinstance(attention, GqaAttention) or not attention.output_gate:
        return []
    return [build.memory("output_gate", 3 * tokens * attention.num_heads * attention.head_dim / build.shape.tp, 5 / 3)]


def _mla_projections(build: LayerBuilder) -> list[Op]:
    """Down projections see own tokens (they are not split); the compressed vectors are gathered over tp."""
    attention = build.model.attention
    assert isinstance(attention, MlaAttention)
    hidden, shape = build.model.hidden_size, build.shape
    tokens, own, heads = shape.gathered_tokens, shape.own_tokens, attention.num_heads / shape.tp
    q_rank, kv_rank, qk = attention.q_lora_rank, attention.kv_lora_rank, attention.qk_head_dim
    kv_width = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    up: tuple[RecomputeModule, ...] = ("mla_up_proj",)
    latent = q_rank + kv_rank + attention.qk_rope_head_dim
    ops = build.quantize("mla_down.quantize", (own * hidden, own * latent), "elementwise", "before", "attention")
    if q_rank:
        ops.append(build.gemm("q_down", (own, q_rank, hidden)))
    ops += [
        build.gemm("kv_down", (own, kv_rank + attention.qk_rope_head_dim, hidden)),
        build.memory("latent_norm", 2 * own * (q_rank + kv_rank), NORM_BACKWARD, modules=up),
        *build.tp_collective(
            "all_gather", "latent_all_gather", (q_rank or hidden) + kv_rank + attention.qk_rope_head_dim
        ),
        *build.quantize(
            "mla_up.quantize",
            (0, tokens * (heads * qk + kv_width)),
            "elementwise",
            "before",
            "attention",
            normed=tokens * (q_rank + kv_rank),
        ),
        build.gemm("q_up", (tokens, heads * qk, q_rank or hidden), modules=up),
        build.gemm("kv_up", (tokens, kv_width, kv_rank), modules=up),
        # Query and key are rewritten with their rotated part, the key from its latent and rotary halves.
        build.memory("rope", 4 * tokens * heads * qk, 1.0, modules=up),
    ]
    return ops


def _attention_core(build: LayerBuilder, layer: int) -> list[Op]:
    """QK, softmax, PV, with what brings queries and keys of different cp ranks together (report section 6)."""
    shape, core = build.shape, attention_core(build, layer)
    if shape.cp == 1:
        return [core]
    if shape.cp_comm == "all_gather":
        return [_gather_keys(build), core]
    if shape.cp_comm == "p2p":
        return _ring(build, core, last_projection(build))
    inside = [core] if shape.cp_comm == "a2a" else _ring(build, core, "cp_split_heads")
    return [_split_heads(build, "cp_split_heads"), *inside, _split_heads(build, "cp_join_heads")]


def attention_core(build: LayerBuilder, layer: int) -> Op:
    """The arithmetic of attention on one rank: tokens of its ranks that split heads, with its share of their heads."""
    model, shape = build.model, build.shape
    attention, tokens = model.attention, shape.gathered_tokens
    heads, qk, v = attention.num_heads / shape.tp, attention.qk_head_dim, attention.v_head_dim
    keys = mean_keys_per_token(model, layer, shape.seq_len, shape.packed_lengths)
    kv_heads = attention.num_kv_heads / shape.tp * (shape.cp if shape.cp_comm == "all_gather" else 1)
    moved = tokens * (heads * (qk + v) + kv_heads * (qk + v)) * shape.element_bytes
    ring = 1 if shape.cp_comm == "all_gather" else shape.cp // shape.cp_head_ranks
    return Op(
        name="attention_core",
        kind="attention",
        family="attention",
        dtype=shape.format.gemm_dtype if shape.fp8_attention else shape.plain_dtype,
        rows=tokens * shape.cp_head_ranks,
        cols=heads / shape.cp_head_ranks,
        # The curves are by sequence length: a window of keys costs as a sequence of twice the mean keys seen, and
        # each ring step of cp works on its own part of the sequence.
        seq_len=2 * keys / ring,
        qk_head_dim=qk,
        v_head_dim=v,
        flops=2 * tokens * heads * (qk + v) * keys,
        rate_frac=shape.attention_frac,
        hbm_bytes=moved,
        backward_hbm_bytes=2 * moved,
        modules=frozenset(("core_attn",)),
    )


def _keys_bytes(build: LayerBuilder) -> float:
    """Keys and values of one rank's part of the sequence; latent attention expands them to all heads."""
    attention, shape = build.model.attention, build.shape
    width = attention.num_kv_heads / shape.tp * (attention.qk_head_dim + attention.v_head_dim)
    return shape.gathered_tokens * width * shape.element_bytes


def key_ring(build: LayerBuilder, after: str) -> Op:
    """Keys and values of the other ranks of a ring, one message a step; backward carries their gradients too."""
    steps = build.shape.cp // build.shape.cp_head_ranks - 1
    return Op(
        name="cp_exchange",
        kind="send_recv",
        family="cp_comm",
        stream="cp",
        comm_bytes=steps * _keys_bytes(build),
        group=build.shape.cp_ring_group,
        num_kernels=steps,
        num_messages=steps,
        after=(after,),
    )


def _ring(build: LayerBuilder, core: Op, before: str) -> list[Op]:
    """Each step computes with the keys it has while the next ones come: all steps but the last run beside the ring.

    Two chunks of the sequence a rank, one from either end, make the steps equal: (r - 1) max(step, message) + step.
    """
    exchange = key_ring(build, before)
    if not build.stack.time.hides_cp:
        return [exchange, core]
    ranks = build.shape.cp // build.shape.cp_head_ranks
    first = _part(core, (ranks - 1) / ranks, name=core.name, after=(before,))
    last = _part(core, 1 / ranks, name="attention_core_last", after=(core.name, exchange.name))
    return [exchange, first, replace(last, num_kernels=0)]  # their kernels count once


def last_projection(build: LayerBuilder) -> str:
    """The op that makes queries and keys ready."""
    attention = build.model.attention
    if isinstance(attention, MlaAttention) or attention.rotary:
        return "rope"
    return "qk_norm" if attention.qk_norm else "qkv_proj"


def _part(core: Op, part: float, *, name: str, after: tuple[str, ...]) -> Op:
    return replace(
        core,
        name=name,
        flops=core.flops * part,
        hbm_bytes=core.hbm_bytes * part,
        backward_hbm_bytes=core.backward_hbm_bytes * part,
        after=after,
    )


def _gather_keys(build: LayerBuilder) -> Op:
    """All keys and values of the sequence before attention, again before its backward, whose gradients are summed."""
    return Op(
        name="cp_gather",
        kind="all_gather",
        family="cp_comm",
        stream="cp",
        comm_bytes=build.shape.cp * _keys_bytes(build),
        group=build.shape.cp_ring_group,
        repeats=True,
    )


def _split_heads(build: LayerBuilder, name: Literal["cp_split_heads", "cp_join_heads"]) -> Op:
    """All-to-all of queries, keys and values from a part of the sequence to a part of the heads; or the output back."""
    attention, shape = build.model.attention, build.shape
    query = attention.num_heads / shape.tp * shape.gathered_tokens * shape.element_bytes
    is_back = name == "cp_join_heads"
    return Op(
        name=name,
        kind="all_to_all",
        family="cp_comm",
        stream="cp",
        comm_bytes=query * attention.v_head_dim if is_back else query * attention.qk_head_dim + _keys_bytes(build),
        group=shape.cp_heads_group,
    )
