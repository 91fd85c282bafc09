"""Transient tensors at the peak: weight gradients, exchange rows, gradients of one operation, recompute.

Rules, within 2 % of the peaks allocated that SimuMax published for B200 (tests/simulator/test_memory.py):
- weight gradients, in the compute type beside the main gradients. Fused accumulation keeps a placeholder of each weight
  shape allocated (``expert_weight_gradients = "one"``); plain autograd makes one matrix's at a time (``"local"``: the
  experts of a rank are one matrix); GEMMs that add to the main gradients leave none (``"none"``);
- dispatcher: rows to send and rows received of one layer, top_k a token each (allgather: every rank's tokens);
- working set: input and output gradients of the operation with the largest ones, or what the backward of a recurrence
  holds in an engine that has no kernel of its own for it;
- recompute: what one layer makes again before its backward;
- gathered weights, under full sharding: the layer that runs and the next one, with their gradients.

An engine whose exchanges have a stream of their own ``holds_exchanged_rows``: beside compute, the rows that one sends
and receives are freed when both streams have passed them, one such pair for each direction under way.

Placeholders and the buffers of the flex dispatcher stay. All-to-all rows are freed before a layer's gradients, and the
logits before any layer's transients: only what exceeds the earlier one counts.
"""

from functools import lru_cache
from typing import NamedTuple

from moeplan.model_spec import LayerKind, ModelSpec
from moeplan.point import Point
from moeplan.simulator.activations import kept_bytes
from moeplan.simulator.placement import layer_groups
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.tensor_sizes import Sizes, sizes_of
from moeplan.simulator.training_state import gathered_bytes
from moeplan.vocabulary import PRECISIONS


class Buffers(NamedTuple):
    """Bytes of transient tensors on one rank, none of them counted twice or under logits."""

    weight_gradients: float
    dispatcher: float
    recompute: float
    working_set: float
    gathered_weights: float


def buffer_bytes(
    model: ModelSpec, point: Point, stack: SoftwareStack, kinds: tuple[LayerKind, ...], loss_bytes: float
) -> Buffers:
    """Transient bytes of a rank that holds layers of ``kinds`` and, on the last stage, ``loss_bytes`` of logits."""
    element_bytes = PRECISIONS[point.precision].activation_bytes
    token_bytes = point.tokens_per_rank * element_bytes
    sizes = _sizes(model, point.seq_len, point.etp, stack.fused_attention)
    head = element_bytes * -(-model.vocab_size // point.tp) * model.hidden_size if loss_bytes else 0.0
    placeholders, largest = _weight_gradient_elements(model, kinds, point.tp, point.etp, point.ep)
    num_ranks = point.ep * point.etp if any(kind.mlp == "moe" for kind in kinds) else 1
    copies = sizes.top_k + (num_ranks if point.dispatcher == "allgather" else sizes.top_k)
    rows = copies * sizes.expert_hidden * token_bytes if num_ranks > 1 else 0.0
    # Gathered keys and values of all ranks, and their gradients before they are summed.
    num_keys = 2 * point.cp if point.cp_comm == "all_gather" and point.cp > 1 else 1
    working = max((_gradient_elements(sizes, kind, num_keys) for kind in kinds), default=0) * token_bytes
    if stack.recurrence_bytes is not None and any(kind.mixer == "linear" for kind in kinds):
        wide = max(1.0, element_bytes / 4)  # fp64 has its states in fp64
        working = max(working, stack.recurrence_bytes.value * wide * sizes.linear_inner * point.tokens_per_rank)
    remade = max((kept_bytes(model, kind, point, stack).remade_bytes for kind in kinds), default=0.0)
    gathered = _gathered_bytes(model, point, stack, kinds)
    at_loss = loss_bytes
    among_gathered = stack.full_sharding != "megatron-fsdp" and gathered
    if among_gathered or stack.expert_weight_gradients == "none":
        head = 0.0
    elif stack.expert_weight_gradients == "local":
        at_loss += head
        working += largest * element_bytes
    else:
        head += placeholders * element_bytes
    held = rows * _directions_beside_compute(point) if stack.holds_exchanged_rows else 0.0
    if point.dispatcher == "flex" and point.flex_backend != "torch":
        working, remade = _beyond(at_loss, working, remade)
    else:
        rows, working, remade = _beyond(at_loss, rows, max(0.0, working - rows), remade)
    return Buffers(head, rows + held, remade, working, gathered)


def _directions_beside_compute(point: Point) -> int:
    """Exchanges that wait for two streams: of a forward and a backward under EP overlap, else of one of them."""
    return 2 if point.ep_overlap else int(point.shared_expert_overlap)


def _gathered_bytes(model: ModelSpec, point: Point, stack: SoftwareStack, kinds: tuple[LayerKind, ...]) -> float:
    if point.sharding != "full":
        return 0.0
    layer = max((_layer_elements(model, kind, point.tp, point.etp, point.ep) for kind in kinds), default=0.0)
    vocabulary = -(-model.vocab_size // point.tp) * model.hidden_size
    return gathered_bytes(point, stack, layer, vocabulary)


@lru_cache(maxsize=1024)
def _layer_elements(model: ModelSpec, kind: LayerKind, tp: int, etp: int, ep: int) -> float:
    return sum(group.num_elements for group in layer_groups(model, kind, tp, etp, ep))


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
def _weight_gradient_elements(
    model: ModelSpec, kinds: tuple[LayerKind, ...], tp: int, etp: int, ep: int
) -> tuple[float, float]:
    """Elements of one layer's linears with one expert's of its experts, and of the largest matrix of a rank.

    Linears that dense and MoE layers share count once. The largest matrix: of an MLP or of the stacked experts the
    input projection; attention counts whole.
    """
    one_expert: dict[str, float] = {}
    largest = 0.0
    input_part = (model.mlp_matrices - 1) / model.mlp_matrices
    for kind in kinds:
        for group in layer_groups(model, kind, tp, etp, ep):
            if group.is_quantized:
                num_local = model.moe.num_experts // ep if model.moe and group.is_expert else 1
                one_expert[group.component] = group.num_elements / num_local
                largest = max(largest, group.num_elements * (1 if group.component == "attention" else input_part))
    return sum(one_expert.values()), largest


def _gradient_elements(sizes: Sizes, kind: LayerKind, num_keys: int) -> float:
    """Per token, input and output gradients of the operation of a layer with the largest ones.

    Attention: of query, key, value (``num_keys`` times a rank's own), output and kept scores; linear mixer: of its
    projection and output. MLP: of the first matrix, or of the activation.
    """
    mixer = {
        "attention": sizes.query + num_keys * (sizes.key + sizes.value) + sizes.attended + sizes.scores,
        "linear": sizes.linear_projection + sizes.linear_inner,
        "none": 0,
    }[kind.mixer]
    if kind.mlp == "none":
        return mixer
    if kind.mlp == "dense":
        first, hidden, rows = sizes.dense, sizes.hidden, 1
    else:
        first, hidden, rows = sizes.expert, sizes.expert_hidden * sizes.etp, sizes.top_k
    return max(mixer, rows * (sizes.projections * first + max(hidden, first)))
