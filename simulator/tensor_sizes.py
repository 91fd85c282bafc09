"""Widths of what a model's layers keep for backward, under the settings that change what is kept."""

from dataclasses import dataclass

from moeplan.mixers import Mamba2, MlaAttention
from moeplan.model_spec import ModelSpec
from moeplan.parameters import linear_mixer_projection


@dataclass(frozen=True, slots=True)
class Sizes:
    """The widths that rows read, in elements per token; 0 for what a model lacks.

    ``scores``: kept attention scores, all heads together; ``gate``: of the output, as wide as all queries;
    ``fused_qkv``: one projection to query, key, value and gate;
    ``kv_down`` and ``kv_up``: outputs of the latent projections; ``inner_norms``: rows normed inside attention.
    ``joins_output``: attention's output is put together from parts that it keeps as well. ``linear_recurrence``: of
    a mixer whose norm waits until ranks that share its groups have its output again.
    """

    hidden: int
    expert_hidden: int
    has_latent: bool
    linear_projection: int
    linear_inner: int
    linear_recurrence: int
    heads: int
    query: int
    key: int
    value: int
    attended: int
    gate: int
    q_rank: int
    kv_rank: int
    kv_down: int
    kv_up: int
    fused_qkv: int
    inner_norms: int
    qk_norm: bool
    scores: int
    dense: int
    experts: int
    top_k: int
    expert: int
    shared: int
    shared_gate: bool
    router_scores: int
    projections: int
    etp: int
    kept_expert_outputs: int
    joins_output: bool


def sizes_of(
    model: ModelSpec,
    *,
    seq_len: int,
    etp: int,
    memory_efficient_permutation: bool,
    fused_attention: bool,
    joins_output: bool = False,
    sums_at_experts: bool = False,
    exchanges_heads: bool = False,
) -> Sizes:
    """Widths of a model under the settings that change what is kept.

    Memory-efficient permutation needs a second expert matrix without bias (report section 1.6). Without it the outputs
    of experts are kept where they are weighed: for a dispatcher that ``sums_at_experts`` on each rank of etp.
    ``exchanges_heads``: ranks of cp run parts of a linear mixer's heads.
    """
    attention, mixer, moe = model.attention, model.linear_mixer, model.moe
    mla = attention if isinstance(attention, MlaAttention) else None
    query = attention.num_heads * attention.qk_head_dim
    key = attention.num_kv_heads * attention.qk_head_dim
    value = attention.num_kv_heads * attention.v_head_dim
    qk_norm = not isinstance(attention, MlaAttention) and attention.qk_norm
    qk_norms = (attention.num_heads + attention.num_kv_heads) * qk_norm
    gate = 0 if isinstance(attention, MlaAttention) else query * attention.output_gate
    return Sizes(
        hidden=model.hidden_size,
        expert_hidden=model.expert_hidden_size,
        has_latent=moe is not None and moe.latent_size > 0,
        linear_projection=linear_mixer_projection(mixer) if mixer else 0,
        linear_inner=mixer.inner_size if mixer else 0,
        linear_recurrence=mixer.inner_size if isinstance(mixer, Mamba2) and exchanges_heads else 0,
        heads=attention.num_heads,
        query=query,
        key=key,
        value=value,
        attended=attention.num_heads * attention.v_head_dim,
        gate=gate,
        q_rank=mla.q_lora_rank if mla else 0,
        kv_rank=mla.kv_lora_rank if mla else 0,
        kv_down=mla.kv_lora_rank + mla.qk_rope_head_dim if mla else 0,
        kv_up=mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) if mla else 0,
        fused_qkv=0 if mla else query + key + value + gate,
        inner_norms=1 + (mla.q_lora_rank > 0) if mla else qk_norms,
        qk_norm=qk_norm,
        scores=0 if fused_attention else attention.num_heads * seq_len,
        dense=model.dense_ffn_size,
        experts=moe.num_experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        expert=moe.expert_ffn_size if moe else 0,
        shared=moe.shared_ffn_size if moe else 0,
        shared_gate=moe is not None and moe.shared_gate,
        router_scores=_router_scores(model),
        projections=2 if model.is_gated else 1,
        etp=etp,
        kept_expert_outputs=_kept_expert_outputs(model, memory_efficient_permutation, etp if sums_at_experts else 1),
        joins_output=joins_output,
    )


def _kept_expert_outputs(model: ModelSpec, memory_efficient_permutation: bool, ranks: int) -> int:  # noqa: FBT001
    if model.moe is None or (memory_efficient_permutation and not model.moe.mlp_bias):
        return 0
    return ranks


def _router_scores(model: ModelSpec) -> int:
    """Tensors of all experts' scores that plain autograd keeps of one routing."""
    if model.moe is None:
        return 0
    router = model.moe.router
    return 1 + (router.score_function == "sigmoid") + (router.z_loss_coeff > 0)
