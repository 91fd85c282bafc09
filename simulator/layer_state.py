"""What one layer keeps on the device for each micro-batch in flight: tensors for backward, padding, graph inputs."""

from collections.abc import Iterator
from functools import lru_cache

from moeplan.model_spec import LayerKind, ModelSpec, Moe
from moeplan.point import Point
from moeplan.simulator.activations import ActivationKind, is_bf16, kept_bytes, saved_tensors
from moeplan.simulator.dispatch import routed_load
from moeplan.simulator.echo import clone_bytes, levelled_load
from moeplan.simulator.placement import Chunk
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.tensor_tables import Component
from moeplan.vocabulary import PRECISIONS, Precision

Part = tuple[Component, str, float]
# Quantized rows of each expert end in whole tiles, with room for the most padding there can be: how much there is, the
# device alone knows (executor: kernels/padded_rows.py).
_TILE_ROWS = 128


def expert_row_factor(model: ModelSpec, point: Point, stack: SoftwareStack) -> float:
    """Rows the busiest rank's experts hold over top_k rows for each token.

    Natural routing: what the stack's spread of choices makes of it; dropping: the capacity. Each expert's rows are
    padded to the recipe's multiple, by half of it on average.
    """
    if model.moe is None:
        return 1.0
    padding = (PRECISIONS[point.precision].alignment - 1) / 2 * model.moe.num_experts / point.ep
    return _imbalance(model.moe, point, stack) * (1 + padding / (point.tokens_per_rank * model.moe.top_k * point.etp))


def _imbalance(moe: Moe, point: Point, stack: SoftwareStack) -> float:
    spread = stack.time.choice_spread_frac.value
    load = levelled_load(routed_load(moe, point.routing, spread, point.ep), point.echo_slots)
    return max(load, point.paged_stash_factor)  # room for that many rows, whoever got them


def graph_io_bytes(model: ModelSpec, kind: ActivationKind, point: Point, stack: SoftwareStack) -> float:
    """Static inputs and outputs of a layer's graphs for one micro-batch in flight (report section 3.4)."""
    if stack.graph_io_rows is None or not point.cuda_graph or kind == "loss" or "full_iteration" in point.cuda_graph:
        return 0.0
    row_bytes = model.hidden_size * PRECISIONS[point.precision].activation_bytes
    return stack.graph_io_rows.value * point.tokens_per_rank * row_bytes


def layer_bytes(model: ModelSpec, kind: ActivationKind, point: Point, stack: SoftwareStack) -> float:
    """Bytes one layer of that kind holds for one micro-batch: the sum of its parts."""
    kept = kept_bytes(model, kind, point, stack)
    extra = (expert_row_factor(model, point, stack) - 1) * kept.expert_rows_bytes
    around = graph_io_bytes(model, kind, point, stack) + clone_bytes(model, kind, point)
    return kept.kept_bytes + kept.scales_bytes + extra + around


def layer_parts(model: ModelSpec, kind: ActivationKind, point: Point, stack: SoftwareStack) -> Iterator[Part]:
    """The same tensor by tensor, as (component, name, bytes)."""
    for tensor in saved_tensors(model, kind, point, stack):
        if tensor.is_kept(point.recompute) and not tensor.is_offloaded(point.offload_modules):
            yield tensor.component, tensor.name, tensor.size_bytes
    kept = kept_bytes(model, kind, point, stack)
    extra = (expert_row_factor(model, point, stack) - 1) * kept.expert_rows_bytes
    yield "block_scales", "block scales of quantized tensors", kept.scales_bytes
    yield "experts", "rows of padding and imbalance", extra
    yield "experts", "weights of clones", clone_bytes(model, kind, point)
    yield "graphs", "static inputs and outputs of graphs", graph_io_bytes(model, kind, point, stack)


def offloaded_bytes(model: ModelSpec, kind: ActivationKind, point: Point, stack: SoftwareStack) -> float:
    """Bytes of one layer that wait on the host; those of few layers at a time are on the device."""
    return kept_bytes(model, kind, point, stack).offloaded_bytes if point.offload_modules else 0.0


def waiting_bytes(model: ModelSpec, point: Point, stack: SoftwareStack, chunks: tuple[Chunk, ...]) -> float:
    """Operands of experts' weight gradients that wait for the next micro-batch, of all layers of a rank.

    Of the first matrix its input and its output's gradient, of the second likewise: rows of H + 2F (gated) and F + H.
    Indices, 4 bytes a row each, are not counted.
    """
    moe = model.moe
    if moe is None or not point.paired_wgrad:
        return 0.0
    total = 0.0
    for kind, count in (one for chunk in chunks for one in layer_counts(chunk)):
        layer = model.mtp_kind if kind == "mtp" else kind
        if isinstance(layer, LayerKind) and layer.mlp == "moe":
            precision = "bf16" if is_bf16(kind, point) else point.precision
            total += count * _waiting_layer_bytes(model, moe, point, stack, PRECISIONS[precision])
    return total


def _waiting_layer_bytes(model: ModelSpec, moe: Moe, point: Point, stack: SoftwareStack, precision: Precision) -> float:
    """Of one layer: quantized operands with their padding; others as rows, or tokens where the first's are copies."""
    rows = point.tokens_per_rank * moe.top_k * point.etp * _imbalance(moe, point, stack)
    inputs, element_bytes = rows, precision.activation_bytes
    if precision.quantized_bytes is not None:
        padding = (_TILE_ROWS - 1) * min(moe.num_experts / point.ep, rows)
        inputs = rows = (rows + padding) // _TILE_ROWS * _TILE_ROWS
        element_bytes = precision.quantized_bytes * (1 + precision.scale_frac)
    elif point.pairs_wait_as_tokens:
        inputs = point.tokens_per_rank
    width, hidden = moe.expert_ffn_size / point.etp, model.expert_hidden_size
    each = {
        "expert_fc1": inputs * hidden + rows * (model.mlp_matrices - 1) * width,
        "expert_fc2": rows * (width + hidden),
    }
    return sum(each[matrix] for matrix in point.paired_wgrad) * element_bytes


def layer_counts(chunk: Chunk) -> Iterator[tuple[ActivationKind, int]]:
    """How many of each kind of layer one chunk runs."""
    yield from chunk.layers
    if chunk.num_mtp:
        yield "mtp", chunk.num_mtp
    if chunk.has_loss:
        yield "loss", 1


def _num_layers(chunks: tuple[Chunk, ...]) -> int:
    return sum(chunk.num_layers for chunk in chunks)


@lru_cache(maxsize=4096)
def on_device_frac(chunks: tuple[Chunk, ...], offload_layers: int) -> float:
    """Part of a rank's layers that keep theirs when ``offload_layers`` send it to the host: one keeps it at least."""
    num_layers = _num_layers(chunks)
    return 1 - min(offload_layers, max(num_layers - 1, 0)) / num_layers if num_layers else 1.0


def chunk_bytes(model: ModelSpec, point: Point, stack: SoftwareStack, chunk: Chunk, device_frac: float) -> float:
    """Bytes of one micro-batch in one virtual stage. ``device_frac``: of the layers that keep theirs here."""
    total = 0.0
    for kind, count in layer_counts(chunk):
        part = 1.0 if kind == "loss" else device_frac
        total += count * part * layer_bytes(model, kind, point, stack)
    return total


def passing_bytes(model: ModelSpec, point: Point, stack: SoftwareStack, chunks: tuple[Chunk, ...]) -> float:
    """What passes through, of the largest layer: tensors back from the host, and the forward beside a backward.

    The latter under EP overlap without a pipeline (report section 2.5); a pipeline holds a whole chunk more.
    """
    kinds = {kind for chunk in chunks for kind, _ in layer_counts(chunk) if kind != "loss"}
    num_layers = _num_layers(chunks)
    resident = min(stack.offload_resident_layers, num_layers)
    back = resident * max((offloaded_bytes(model, kind, point, stack) for kind in kinds), default=0.0)
    staying = num_layers - min(point.offload_layers, max(num_layers - 1, 0))
    if resident > staying:
        back += (resident - staying) * max((layer_bytes(model, kind, point, stack) for kind in kinds), default=0.0)
    if point.ep_overlap and point.pp == 1 and point.num_micro_batches > 1:
        back += max((layer_bytes(model, kind, point, stack) for kind in kinds), default=0.0)
    return back
