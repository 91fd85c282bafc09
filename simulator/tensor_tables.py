"""What each stack family keeps for backward: one literal table a family, one row a tensor.

A row gives elements per token; tokens are those of one micro-batch on one rank, after the split over tp (sequence
parallel) and cp. Tensors that tp splits by heads or width instead hold tp times the tokens and 1/tp of the width,
which is the same number of elements. Rows without elements (say, of a rank the model lacks) do not exist.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from moeplan.simulator.tensor_sizes import Sizes
from moeplan.vocabulary import Bf16Module, OffloadModule, RecomputeModule

Component = Literal[
    "attention",
    "linear_mixer",
    "norms",
    "router",
    "latent",
    "experts",
    "shared_experts",
    "dense_mlp",
    "embedding",
    "head",
    "mtp",
    "block_scales",
    "weight_gradients",
    "dispatcher",
    "recompute",
    "working_set",
    "gathered_weights",
    "graphs",
]
# activation: the recipe's activation type. quantized: the low-precision type of the recipe, where it has one, because
# the linear that reads the tensor stores its quantized input. fp32_copy: of a tensor kept anyway, nothing where
# activations are as wide. delayed_copy: quantized beside a tensor kept anyway, under delayed scaling alone, whose
# linears cannot start from the original. quantized_copy: the same under every low-precision recipe. The others: that
# type in every recipe.
Storage = Literal[
    "activation", "quantized", "fp32", "int64", "int32", "byte", "fp32_copy", "delayed_copy", "quantized_copy"
]
TableName = Literal["megatron", "native", "torchtitan", "korthikanti-2022"]
Section = Literal["attention", "linear", "dense", "moe", "mtp", "loss"]


@dataclass(frozen=True, slots=True)
class Row:
    """One kept tensor. ``dropped_by``: the recompute modules that drop it; full drops all but ``kept_by_full``.

    ``is_block_input``: full recompute starts from it in the first block of a layer.
    ``offloaded_by``: the module whose fine-grained offload takes it to the host (report section 1.4).
    ``input_of``: the linears that store it, where a plan may keep those out of its low precision.
    """

    name: str
    component: Component
    elements: Callable[[Sizes], float]
    storage: Storage = "activation"
    dropped_by: tuple[RecomputeModule, ...] = ()
    kept_by_full: bool = False
    is_block_input: bool = False
    offloaded_by: OffloadModule | None = None
    input_of: Bf16Module | None = None


# Report section 1.4, in its order. MLA and grouped-query attention in one list: a model has the rows of either.
_INPUT = Row("layer input", "norms", lambda z: z.hidden, is_block_input=True, offloaded_by="attn_norm")
_MLP_INPUT = Row("input of the MLP block", "norms", lambda z: z.hidden, is_block_input=True, offloaded_by="mlp_norm")
_MLP_NORM = Row("pre-MLP norm output", "norms", lambda z: z.hidden, "quantized", ("layernorm",))
_ATTENTION = (
    _INPUT,
    Row("input norm output", "norms", lambda z: z.hidden, "quantized", ("layernorm",), offloaded_by="qkv_linear"),
    Row("query down-projection output", "attention", lambda z: z.q_rank),
    Row("query norm output", "attention", lambda z: z.q_rank, "quantized"),
    Row("compressed key-value", "attention", lambda z: z.kv_rank),
    Row("key-value norm output", "attention", lambda z: z.kv_rank, "quantized"),
    Row("query before its norm", "attention", lambda z: z.query * z.qk_norm),
    Row("key before its norm", "attention", lambda z: z.key * z.qk_norm),
    Row("query", "attention", lambda z: z.query, dropped_by=("mla_up_proj",), offloaded_by="core_attn"),
    Row("key", "attention", lambda z: z.key, dropped_by=("mla_up_proj",), offloaded_by="core_attn"),
    Row("value", "attention", lambda z: z.value, dropped_by=("mla_up_proj",), offloaded_by="core_attn"),
    Row("attention output", "attention", lambda z: z.attended, offloaded_by="attn_proj"),
    Row("attention output of delayed scaling", "attention", lambda z: z.attended * (not z.gate), "delayed_copy"),
    Row("gate of the output", "attention", lambda z: z.gate),
    Row("attention output after its gate", "attention", lambda z: z.gate, "quantized", offloaded_by="attn_proj"),
    Row("softmax log-sum-exp", "attention", lambda z: z.heads * (z.scores == 0), "fp32", ("core_attn",)),
    Row("softmax output", "attention", lambda z: z.scores, dropped_by=("core_attn",)),
)
# A linear mixer keeps what its kernels start from in backward: the projection, the recurrence's output before its gate
# and after it, which is the norm's input.
_LINEAR = (
    *_ATTENTION[:2],
    Row("linear mixer as projected", "linear_mixer", lambda z: z.linear_projection),
    Row("output of the recurrence", "linear_mixer", lambda z: z.linear_inner),
    Row("input of the gated norm", "linear_mixer", lambda z: z.linear_inner),
    Row("input of the linear mixer's output projection", "linear_mixer", lambda z: z.linear_inner, "quantized"),
)
_FEED_FORWARD = (
    Row("FC1 output", "dense_mlp", lambda z: z.projections * z.dense, dropped_by=("mlp",)),
    Row("activation output", "dense_mlp", lambda z: z.dense, "quantized", ("mlp",)),
)
_DENSE = (_MLP_INPUT, _MLP_NORM, *_FEED_FORWARD)
_SHARED = (
    Row(
        "shared FC1 output",
        "shared_experts",
        lambda z: z.projections * z.shared,
        "quantized",
        ("shared_experts", "moe"),
    ),
    Row("shared activation output", "shared_experts", lambda z: z.shared, "quantized", ("shared_experts", "moe")),
    Row(
        "shared output before its gate",
        "shared_experts",
        lambda z: z.hidden * z.shared_gate,
        dropped_by=("shared_experts", "moe"),
    ),
)
# After the exchange a rank holds top_k rows a token (balanced routing); with etp > 1 each rank of the group gathers
# the rows of all, so rows grow by etp and the split widths shrink by it.
_EXPERTS = (
    Row(
        "expert FC1 input",
        "experts",
        lambda z: z.top_k * z.expert_hidden * z.etp,
        "quantized",
        ("moe",),
        offloaded_by="expert_fc1",
    ),
    Row(
        "expert FC1 output",
        "experts",
        lambda z: z.top_k * z.projections * z.expert,
        dropped_by=("moe",),
        offloaded_by="moe_act",
    ),
    Row("expert activation output", "experts", lambda z: z.top_k * z.expert, dropped_by=("moe_act", "moe")),
    Row(
        "expert output kept for its probability",
        "experts",
        lambda z: z.top_k * z.expert_hidden * z.kept_expert_outputs,
        dropped_by=("moe",),
    ),
)
_LATENT = (
    Row(
        "input of the projection to the latent", "latent", lambda z: z.hidden * z.has_latent, "quantized_copy", ("moe",)
    ),
    Row("combined latent", "latent", lambda z: z.expert_hidden * z.has_latent, "quantized", ("moe",)),
)
_MOE = (
    _MLP_INPUT,
    _MLP_NORM,
    Row("router probabilities", "router", lambda z: z.experts, dropped_by=("moe",)),
    Row("permutation row map", "router", lambda z: z.experts, "int64", ("moe",)),
    *_SHARED,
    *_EXPERTS,
    *_LATENT,
)
# An MTP depth norms two inputs, joins and projects them, then runs a layer and a final norm (report section 8).
_MTP = (
    Row("MTP hidden input", "mtp", lambda z: z.hidden, kept_by_full=True),
    Row("MTP embedding input", "mtp", lambda z: z.hidden, kept_by_full=True),
    Row("MTP projection input", "mtp", lambda z: 2 * z.hidden),
    Row("MTP final norm input", "mtp", lambda z: z.hidden, kept_by_full=True),
    Row("MTP head input", "mtp", lambda z: z.hidden, kept_by_full=True),
)
_LOSS = (
    Row("final norm input", "head", lambda z: z.hidden, kept_by_full=True),
    Row("head input", "head", lambda z: z.hidden, kept_by_full=True),
)

# The executor, counted by hooks on what its autograd saves (tests/executor/test_saved_bytes.py). Against Megatron's:
# under a QK norm one storage holds query, key, value and gate as projected (views keep the whole), the latent down
# projection's holds the rotary part of the key as well, and the permutation is two indices and not a map of experts.
# In low precision each linear keeps its input quantized, beside the input where something else keeps that.
_NATIVE_ATTENTION = (
    _INPUT,
    replace(_ATTENTION[1], input_of="attention"),
    Row(
        "input of the second latent projection",
        "attention",
        lambda z: z.hidden * (z.kv_rank > 0),
        "quantized_copy",
        ("layernorm",),
        input_of="attention",
    ),
    Row("norm statistics", "norms", lambda z: 1 + z.inner_norms, "fp32"),
    Row("query down-projection output", "attention", lambda z: z.q_rank),
    Row("query norm output", "attention", lambda z: z.q_rank, "quantized", input_of="attention"),
    Row("key-value down-projection output", "attention", lambda z: z.kv_down),
    Row("key-value norm output", "attention", lambda z: z.kv_rank, "quantized", input_of="attention"),
    Row("query, key and value as projected", "attention", lambda z: z.fused_qkv * z.qk_norm),
    Row("query", "attention", lambda z: z.query, dropped_by=("mla_up_proj",), offloaded_by="core_attn"),
    Row("key", "attention", lambda z: z.key, dropped_by=("mla_up_proj",), offloaded_by="core_attn"),
    Row(
        "value",
        "attention",
        lambda z: z.value * (not z.qk_norm),
        dropped_by=("mla_up_proj",),
        offloaded_by="core_attn",
    ),
    Row("gate of the output", "attention", lambda z: z.gate * (not z.qk_norm)),
    Row(
        "attention output before its gate",
        "attention",
        lambda z: z.gate,
        dropped_by=("core_attn",),
        offloaded_by="attn_proj",
    ),
    Row("attention output", "attention", lambda z: z.attended, offloaded_by="attn_proj"),
    Row("input of the output projection", "attention", lambda z: z.attended, "quantized_copy", input_of="attention"),
    Row(
        "softmax log-sum-exp",
        "attention",
        lambda z: z.heads * (z.scores == 0),
        "fp32",
        ("core_attn",),
        offloaded_by="attn_proj",
    ),
    Row(
        "attention output before it is put together",
        "attention",
        lambda z: z.attended * z.joins_output,
        dropped_by=("core_attn",),
        offloaded_by="attn_proj",
    ),
    Row("softmax output", "attention", lambda z: z.scores, "fp32", ("core_attn",)),
)
# Convolution, recurrence and gated norm run again in backward.
_NATIVE_LINEAR = (
    *_ATTENTION[:2],
    Row("norm statistics", "norms", lambda _: 1, "fp32"),
    Row("linear mixer as projected", "linear_mixer", lambda z: z.linear_projection),
    Row("output of the recurrence", "linear_mixer", lambda z: z.linear_recurrence),
    replace(_LINEAR[-1], input_of="linear_out"),
)
_NATIVE_MLP_INPUT = (_MLP_INPUT, Row("pre-MLP norm statistics", "norms", lambda _: 1, "fp32"))
_NATIVE_DENSE = (*_NATIVE_MLP_INPUT, _MLP_NORM, *_FEED_FORWARD)
_NATIVE_SHARED = (
    Row(
        "input of the shared expert",
        "shared_experts",
        lambda z: z.hidden * (z.shared > 0),
        "quantized_copy",
        ("layernorm", "shared_experts", "moe"),
    ),
    Row(
        "shared FC1 output",
        "shared_experts",
        lambda z: z.projections * z.shared,
        dropped_by=("shared_experts", "moe"),
    ),
    *_SHARED[1:],
)
_NATIVE_EXPERTS = tuple(
    replace(row, storage="quantized") if row.name == "expert activation output" else row for row in _EXPERTS
)
_NATIVE_MOE = (
    *_NATIVE_MLP_INPUT,
    Row("pre-MLP norm output", "norms", lambda z: z.hidden, dropped_by=("layernorm",)),  # the router's input as well
    Row("router scores", "router", lambda z: z.router_scores * z.experts, "fp32", ("moe",)),
    Row("router probabilities", "router", lambda z: 2 * z.top_k + (z.top_k > 1), "fp32", ("moe",)),
    Row("chosen experts", "router", lambda z: z.top_k, "int64", ("moe",)),
    Row("permutation indices", "router", lambda z: 2 * z.top_k, "int32", ("moe",)),
    *_NATIVE_SHARED,
    *_NATIVE_EXPERTS,
    replace(_LATENT[0], dropped_by=("layernorm", "moe"), input_of="latent"),
    replace(_LATENT[1], input_of="latent"),
)
# The final norm's output is the hidden input of the first depth, and each depth's that of the next: kept once.
_NATIVE_LOSS = (
    *_LOSS,
    Row("norm statistics", "head", lambda _: 1, "fp32", kept_by_full=True),
    Row("sums of exponentials", "head", lambda _: 1, "fp32", kept_by_full=True),
    Row("targets", "head", lambda _: 1, "int64", kept_by_full=True),
)
_NATIVE_MTP = (
    Row("MTP embedding input", "mtp", lambda z: z.hidden, kept_by_full=True),
    Row("MTP projection input", "mtp", lambda z: 2 * z.hidden, kept_by_full=True),
    Row("MTP final norm input", "mtp", lambda z: z.hidden, kept_by_full=True),
    Row("MTP head input", "mtp", lambda z: z.hidden, kept_by_full=True),
    Row("MTP norm statistics", "mtp", lambda _: 3, "fp32", kept_by_full=True),
    Row("MTP sums of exponentials", "mtp", lambda _: 1, "fp32", kept_by_full=True),
    Row("MTP targets", "mtp", lambda _: 1, "int64", kept_by_full=True),
)

# torchtitan under torch.compile. Its selective checkpointing (here the module mlp, the nearest name) saves what its
# list of operations names, torchtitan/distributed/activation_checkpoint.py: every second matrix product (the query,
# value, gate and MLP outputs), attention, and what an exchange delivers; grouped products are made again.
_TITAN_ATTENTION = (
    _INPUT,
    Row("input norm output", "norms", lambda z: z.hidden, dropped_by=("mlp",)),
    Row("key-value down-projection output", "attention", lambda z: z.kv_down, dropped_by=("mlp",)),
    Row("query before its norm", "attention", lambda z: z.query * z.qk_norm, dropped_by=("mlp",)),
    Row("key before its norm", "attention", lambda z: z.key * z.qk_norm, dropped_by=("mlp",)),
    Row("query", "attention", lambda z: z.query),
    Row("key", "attention", lambda z: z.key, dropped_by=("mlp",)),
    Row("value", "attention", lambda z: z.value),
    Row("attention output", "attention", lambda z: z.attended),
    Row("softmax log-sum-exp", "attention", lambda z: z.heads * (z.scores == 0), "fp32"),
    Row("softmax output", "attention", lambda z: z.scores, dropped_by=("mlp",)),
)
_TITAN_MLP_INPUT = (
    Row("input of the MLP block", "norms", lambda z: z.hidden, dropped_by=("mlp",), is_block_input=True),
    Row("pre-MLP norm output", "norms", lambda z: z.hidden, dropped_by=("mlp",)),
)
_TITAN_DENSE = (
    *_TITAN_MLP_INPUT,
    Row("gate output", "dense_mlp", lambda z: z.dense),
    Row("up output", "dense_mlp", lambda z: (z.projections - 1) * z.dense, dropped_by=("mlp",)),
    Row("activation output", "dense_mlp", lambda z: z.dense, dropped_by=("mlp",)),
    Row("MLP output", "dense_mlp", lambda z: z.hidden),
)
_TITAN_MOE = (
    *_TITAN_MLP_INPUT,
    Row("router probabilities", "router", lambda z: z.experts, "fp32", ("mlp",)),
    Row("shared gate output", "shared_experts", lambda z: z.shared),
    Row("shared up output", "shared_experts", lambda z: (z.projections - 1) * z.shared, dropped_by=("mlp",)),
    Row("shared activation output", "shared_experts", lambda z: z.shared, dropped_by=("mlp",)),
    Row("expert FC1 input", "experts", lambda z: z.top_k * z.expert_hidden * z.etp),
    Row("expert FC1 output", "experts", lambda z: z.top_k * z.projections * z.expert, dropped_by=("mlp",)),
    Row("expert activation output", "experts", lambda z: z.top_k * z.expert, dropped_by=("mlp",)),
    Row("expert output in fp32 for its probability", "experts", lambda z: z.top_k * z.expert_hidden, "fp32", ("mlp",)),
    Row("combined output", "experts", lambda z: z.hidden),
)

# Korthikanti et al. section 4.1, in units of the classic layer: multi-head attention as wide as the model, a GELU MLP
# of 4 x hidden and dropout, whatever the model's own widths. 34 sbh + 5 a s^2 b bytes a layer; with tp (sequence
# parallel) 1/tp of it. The report applies it to Llama-3.1-405B (section 1.1).
_CLASSIC_ATTENTION = (
    _INPUT,
    Row("input norm output", "attention", lambda z: z.hidden),
    Row("query", "attention", lambda z: z.hidden),
    Row("key", "attention", lambda z: z.hidden),
    Row("value", "attention", lambda z: z.hidden),
    Row("softmax output", "attention", lambda z: z.scores, dropped_by=("core_attn",)),
    Row("softmax dropout mask", "attention", lambda z: z.scores, "byte", ("core_attn",)),
    Row("softmax dropout output", "attention", lambda z: z.scores, dropped_by=("core_attn",)),
    Row("attention output", "attention", lambda z: z.hidden),
    Row("attention dropout mask", "attention", lambda z: z.hidden, "byte"),
)
_CLASSIC_MLP = (
    Row("input of the MLP block", "norms", lambda z: z.hidden, is_block_input=True),
    Row("pre-MLP norm output", "dense_mlp", lambda z: z.hidden),
    Row("FC1 output", "dense_mlp", lambda z: 4 * z.hidden),
    Row("activation output", "dense_mlp", lambda z: 4 * z.hidden),
    Row("MLP dropout mask", "dense_mlp", lambda z: z.hidden, "byte"),
)

TABLES: dict[TableName, dict[Section, tuple[Row, ...]]] = {
    "megatron": {"attention": _ATTENTION, "linear": _LINEAR, "dense": _DENSE, "moe": _MOE, "mtp": _MTP, "loss": _LOSS},
    "native": {
        "attention": _NATIVE_ATTENTION,
        "linear": _NATIVE_LINEAR,
        "dense": _NATIVE_DENSE,
        "moe": _NATIVE_MOE,
        "mtp": _NATIVE_MTP,
        "loss": _NATIVE_LOSS,
    },
    "torchtitan": {
        "attention": _TITAN_ATTENTION,
        "linear": (),  # refused by activations.py
        "dense": _TITAN_DENSE,
        "moe": _TITAN_MOE,
        "mtp": _MTP,
        "loss": _LOSS,
    },
    "korthikanti-2022": {
        "attention": _CLASSIC_ATTENTION,
        "linear": (),
        "dense": _CLASSIC_MLP,
        "moe": (),
        "mtp": (),
        "loss": _LOSS,
    },
}
