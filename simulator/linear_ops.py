"""Forward ops of a linear mixer: Mamba-2 and the gated delta rule, projections to residual.

Both work in chunks of tokens: matrix products inside a chunk, and a state of fixed size a head from chunk to chunk.
Those products are small; what takes the time is the memory that a train of kernels moves (PyTorch's account of its
fused kernel for Mamba-2: "mostly bottlenecked by memory bandwidth and latency").
"""

from typing import Literal, get_args

from moeplan.mixers import LinearMixer, Mamba2
from moeplan.parameters import linear_mixer_projection
from moeplan.simulator.layer_builder import NORM_BACKWARD, LayerBuilder
from moeplan.simulator.op import GraphScope, Op
from moeplan.simulator.scan_traffic import Traffic, scan_traffic
from moeplan.vocabulary import OpFamily

HeadExchange = Literal["cp_split_heads", "cp_join_heads"]
HEAD_EXCHANGES: tuple[HeadExchange, ...] = get_args(HeadExchange)


def linear_mixer_ops(build: LayerBuilder, mixer: LinearMixer) -> list[Op]:
    """Forward ops of the block, its norm and residual included."""
    hidden, shape, scope = build.model.hidden_size, build.shape, graph_scope(mixer)
    tokens, own = shape.gathered_tokens, shape.own_tokens
    columns, inner = linear_mixer_projection(mixer) / shape.tp, mixer.inner_size / shape.tp
    traffic = scan_traffic(mixer, shape.element_bytes, shape.mbs)
    out = build.of_module("linear_out")
    return [
        build.memory("input_norm", 2 * own * hidden, NORM_BACKWARD, scope=scope, modules=("layernorm",)),
        *build.tp_collective("all_gather", "linear_all_gather", hidden, scope),
        *build.quantize(
            "linear_in.quantize", (0, tokens * columns), "elementwise", "before", scope, normed=tokens * hidden
        ),
        build.gemm("linear_in", (tokens, columns, hidden), scope=scope),
        *exchange_heads(build, mixer, "cp_split_heads"),
        _kernels(build, "linear_conv", "elementwise", traffic.conv, scope),
        _kernels(build, "recurrence", "attention", traffic.scan, scope),
        *exchange_heads(build, mixer, "cp_join_heads"),
        _kernels(build, "linear_gated_norm", "elementwise", traffic.norm, scope),
        *out.quantize("linear_out.quantize", (tokens * inner, tokens * hidden), "elementwise", "before", scope),
        out.gemm("linear_out", (tokens, hidden, inner), scope=scope),
        *build.tp_collective("reduce_scatter", "linear_reduce_scatter", hidden, scope),
        build.memory("linear_residual", 3 * own * hidden, 1 / 3, scope=scope),
    ]


def graph_scope(mixer: LinearMixer) -> GraphScope:
    """The scope whose graph holds the layer: Megatron captures a gated delta net in the place of attention."""
    return "mamba" if isinstance(mixer, Mamba2) else "attention"


def _kernels(build: LayerBuilder, name: str, family: OpFamily, traffic: Traffic, scope: GraphScope) -> Op:
    """Kernels of a rank's heads: they wait for each other and for small products more than for memory."""
    most = build.stack.time.scan_bytes_per_s
    tokens = build.shape.gathered_tokens / build.shape.tp
    return Op(
        name=name,
        kind="memory",
        family=family,
        hbm_bytes=tokens * traffic.forward_bytes,
        backward_hbm_bytes=tokens * traffic.backward_bytes,
        most_bytes_per_s=0.0 if most is None else most.value,
        num_kernels=traffic.forward_kernels,
        backward_num_kernels=traffic.backward_kernels,
        scope=scope,
        repeats=build.stack.time.repeats_scans,
    )


def exchange_heads(build: LayerBuilder, mixer: LinearMixer, name: HeadExchange) -> list[Op]:
    """All-to-all of all cp ranks between parts of the sequence and of the heads: a state runs through the sequence."""
    shape = build.shape
    if shape.cp == 1:
        return []
    width = mixer.inner_size / shape.tp
    if name == "cp_split_heads":
        width = linear_mixer_projection(mixer) / shape.tp
        if isinstance(mixer, Mamba2):  # B and C of a group go to every rank that has heads of it
            groups = mixer.num_groups / shape.tp
            width += 2 * (max(groups, shape.cp) - groups) * mixer.state_size
    return [
        Op(
            name=name,
            kind="all_to_all",
            family="cp_comm",
            stream="cp",
            comm_bytes=shape.gathered_tokens * width * shape.element_bytes,
            group=shape.cp_group,
            scope=graph_scope(mixer),
        )
    ]
