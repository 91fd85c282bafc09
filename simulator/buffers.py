"""Transient tensors at the peak: exchange rows, gradients of one operation, one layer made again by recompute.

Rules, within 2 % of the peaks allocated that SimuMax published for B200 (tests/simulator/test_memory.py):
- weight gradients: one in the compute type for every linear of a layer, beside the main gradients; with fused
  accumulation a placeholder of each weight shape stays allocated (``expert_weight_gradients = "one"``);
- dispatcher: rows to send and rows received of one layer, top_k rows a token each;
- working set: input and output gradients of the operation with the largest ones;
- recompute: what one layer makes again before its backward.

The flex dispatcher keeps its buffers; all-to-all rows are freed before a layer's gradients, and a layer's transients
come after the logits are freed: only what exceeds the earlier one counts.
"""

from functools import lru_cache
from typing import NamedTuple

from moeplan.model_spec import LayerKind, ModelSpec
from moeplan.point import Point
from moeplan.simulator.activations import kept_bytes
from moeplan.simulator.placement import layer_groups
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.tensor_tables import Sizes, sizes_of
from moeplan.vocabulary import PRECISIONS


class Buffers(NamedTuple):
    """Bytes of transient tensors on one rank, none of them counted twice or under logits."""

    weight_gradients: float
    dispatcher: float
    recompute: float
    working_set: float


def buffer_bytes(
    model: ModelSpec, point: Point, stack: SoftwareStack, kinds: tuple[LayerKind, ...], loss_bytes: float
) -> Buffers:
    """Transient bytes of a rank that holds layers of ``kinds`` and, on the last stage, ``loss_bytes`` of logits."""
    element_bytes = PRECISIONS[point.precision].activation_bytes
    token_bytes = point.tokens_per_rank * element_bytes
    sizes = _sizes(model, point.seq_len, point.etp, stack.fused_attention)
    gradients = element_bytes * _weight_gradient_elements(
        model, kinds, point.tp, point.etp, point.ep, stack.expert_weight_gradients == "one"
    )
    if loss_bytes:
        gradients += element_bytes * -(-model.vocab_size // point.tp) * model.hidden_size
    rows = 2 * sizes.top_k * sizes.hidden * token_bytes if "moe" in kinds and point.ep * point.etp > 1 else 0.0
    working = max((_gradient_elements(sizes, kind) for kind in kinds), default=0) * token_bytes
    remade = max((kept_bytes(model, kind, point, stack).remade_bytes for kind in kinds), default=0.0)
    if point.dispatcher == "flex":
        working, remade = _beyond(loss_bytes, working, remade)
    else:
        rows, working, remade = _beyond(loss_bytes, rows, max(0.0, working - rows), remade)
    return Buffers(gradients, rows, remade, working)


def _beyond(hidden_bytes: float, *parts: float) -> list[float]:
    """The parts less ``hidden_bytes`` in all, taken from the first ones first."""
    left = []
    for part in parts:
        taken = min(part, hidden_bytes)
        hidden_bytes -= taken
        left.append(part - taken)
    return left


@lru_cache(maxsize=1024)
def _sizes(model: ModelSpec, seq_len: int, etp: int, fused_attention: bool) -> Sizes:  # noqa: FBT001 - cached by value
    return sizes_of(model, seq_len=seq_len, etp=etp, memory_efficient_permutation=True, fused_attention=fused_attention)


@lru_cache(maxsize=4096)
def _weight_gradient_elements(  # noqa: PLR0917 - cached by value
    model: ModelSpec,
    kinds: tuple[LayerKind, ...],
    tp: int,
    etp: int,
    ep: int,
    one_expert: bool,  # noqa: FBT001
) -> float:
    """Elements of one layer's linears; of every component once where a rank holds dense and MoE layers."""
    components: dict[str, float] = {}
    for kind in kinds:
        for group in layer_groups(model, kind, tp, etp, ep):
            if group.is_quantized:
                local = model.moe.num_experts // ep if model.moe and group.is_expert and one_expert else 1
                components[group.component] = group.num_elements / local
    return sum(components.values())


def _gradient_elements(sizes: Sizes, kind: LayerKind) -> float:
    """Per token, input and output gradients of the operation of a layer with the largest ones.

    Attention: of query, key, value, output and kept scores. MLP: of the first matrix, or of the activation.
    """
    attention = sizes.query + sizes.key + sizes.value + sizes.attended + sizes.scores
    if kind == "dense":
        first, hidden, rows = sizes.dense, sizes.hidden, 1
    else:
        first, hidden, rows = sizes.expert, sizes.hidden * sizes.etp, sizes.top_k
    mlp = rows * (sizes.projections * first + max(hidden, first))
    return max(attention, mlp)
