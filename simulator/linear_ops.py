"""Forward ops of a linear mixer: Mamba-2 and the gated delta rule, projections to residual.

Both work in chunks of tokens: matrix products inside a chunk, and a state of fixed size a head from chunk to chunk.
Those products are small; what takes the time is the memory that a train of kernels moves, states in fp32 above all.
"""

from typing import Literal

from moeplan.mixers import LinearMixer, Mamba2
from moeplan.parameters import linear_mixer_projection
from moeplan.simulator.layer_builder import ACTIVATION_BACKWARD, NORM_BACKWARD, LayerBuilder
from moeplan.simulator.op import Op

# Kernels of the recurrence: sums of decays, states of chunks, states passed on, products inside a chunk, outputs.
# Backward runs each of them again or its transpose, and reduces the gradients that heads share.
RECURRENCE_KERNELS = 5
# Bytes that the backward of the recurrence moves over those of its forward, which it makes again: inputs and states
# once more, and a gradient of each.
RECURRENCE_BACKWARD = 2.5
STATE_BYTES = 4.0  # states are kept and passed on in fp32


def linear_mixer_ops(build: LayerBuilder, mixer: LinearMixer) -> list[Op]:
    """Forward ops of the block, its norm and residual included."""
    hidden, shape = build.model.hidden_size, build.shape
    tokens, own = shape.gathered_tokens, shape.own_tokens
    columns, inner = linear_mixer_projection(mixer) / shape.tp, mixer.inner_size / shape.tp
    return [
        build.memory("input_norm", 2 * own * hidden, NORM_BACKWARD, modules=("layernorm",)),
        *build.tp_collective("all_gather", "linear_all_gather", hidden),
        *build.quantize(
            "linear_in.quantize", (0, tokens * columns), "elementwise", "before", "attention", normed=tokens * hidden
        ),
        build.gemm("linear_in", (tokens, columns, hidden)),
        *_split_heads(build, mixer, "cp_split_heads"),
        build.memory("linear_conv", 2 * tokens * mixer.conv_size / shape.tp, ACTIVATION_BACKWARD),
        _recurrence(build, mixer),
        build.memory("linear_gated_norm", 3 * tokens * inner, NORM_BACKWARD),
        *_split_heads(build, mixer, "cp_join_heads"),
        *build.quantize("linear_out.quantize", (tokens * inner, tokens * hidden), "elementwise", "before", "attention"),
        build.gemm("linear_out", (tokens, hidden, inner)),
        *build.tp_collective("reduce_scatter", "linear_reduce_scatter", hidden),
        build.memory("linear_residual", 3 * own * hidden, 1 / 3),
    ]


def _recurrence(build: LayerBuilder, mixer: LinearMixer) -> Op:
    """Inputs read and output written once; the state of each chunk written, passed on (read, written) and read."""
    shape = build.shape
    element_bytes = shape.element_bytes
    inputs = (mixer.conv_size + mixer.inner_size) * element_bytes
    states = 4 * state_elements(mixer) / mixer.chunk_size * STATE_BYTES
    factor = build.stack.time.recurrence_factor
    moved = shape.gathered_tokens / shape.tp * (inputs + states) * (1.0 if factor is None else factor.value)
    return Op(
        name="recurrence",
        kind="memory",
        family="attention",
        hbm_bytes=moved,
        backward_hbm_bytes=RECURRENCE_BACKWARD * moved,
        num_kernels=RECURRENCE_KERNELS,
        scope="attention",
    )


def state_elements(mixer: LinearMixer) -> int:
    """Elements of the state that one chunk hands to the next, all heads."""
    if isinstance(mixer, Mamba2):
        return mixer.inner_size * mixer.state_size
    return mixer.inner_size * mixer.k_head_dim


def _split_heads(build: LayerBuilder, mixer: LinearMixer, name: Literal["cp_split_heads", "cp_join_heads"]) -> list[Op]:
    """All-to-all from a part of the sequence to a part of the heads, as the state runs through the whole sequence."""
    shape = build.shape
    if shape.cp == 1:
        return []
    width = linear_mixer_projection(mixer) if name == "cp_split_heads" else mixer.inner_size
    return [
        Op(
            name=name,
            kind="all_to_all",
            family="cp_comm",
            stream="cp",
            comm_bytes=shape.gathered_tokens * width / shape.tp * shape.element_bytes,
            group=shape.cp_ring_group if shape.cp_head_ranks == 1 else shape.cp_heads_group,
        )
    ]
