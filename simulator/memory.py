"""Peak device memory of every pipeline rank, by category and by component (report section 1)."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.model_spec import LayerKind, ModelSpec
from moeplan.point import Point
from moeplan.simulator.activations import ActivationKind, kept_bytes, saved_tensors
from moeplan.simulator.buffers import buffer_bytes
from moeplan.simulator.in_flight import peak_counts
from moeplan.simulator.placement import Chunk, rank_chunks, rank_elements, rank_parameters
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.tensor_tables import Component
from moeplan.vocabulary import MEMORY_CATEGORIES, PRECISIONS, MemoryCategory

_DTYPE_BYTES = {"fp64": 8.0, "fp32": 4.0, "bf16": 2.0}
_MAIN_WEIGHT_BYTES = 4.0  # fp32
_LOGIT_DTYPE_BYTES = 4.0  # what a stack's logit_bytes presume; the fp64 recipe doubles them


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """Bytes of one component on one pipeline rank at its peak; ``name`` tells kept tensors apart."""

    category: MemoryCategory
    component: Component
    name: str
    size_bytes: float


class StateBytes(NamedTuple):
    """Bytes one rank holds for each of its parameters."""

    weights: float
    gradients: float
    optimizer: float


def bytes_per_parameter(point: Point, *, is_expert: bool, is_quantized: bool) -> StateBytes:
    """Training state of one parameter (report section 1.2).

    The optimizer's part (main weights where the recipe has them, two moments) is split over d = dp x cp for dense
    parameters and d = edp for experts: BF16 with fp32 moments 6 + 12/d, with BF16 moments 6 + 8/d; fp32 8 + 8/d;
    FP8 with BF16 moments 8 + 8/d. Block scales of weights (at most 3 %) are left out, as the report does.
    """
    precision = PRECISIONS[point.precision]
    main = _MAIN_WEIGHT_BYTES if precision.has_main_weights else 0.0
    shards = 1
    if point.sharding == "optimizer":
        shards = point.edp if is_expert else point.dp * point.cp
    return StateBytes(
        weights=precision.param_bytes + precision.quantized_weight_bytes * is_quantized,
        gradients=_DTYPE_BYTES[point.grad_dtype],
        optimizer=(main + 2 * _DTYPE_BYTES[point.moment_dtype]) / shards,
    )


def memory_by_rank(
    model: ModelSpec, point: Point, stack: SoftwareStack, profile: HardwareProfile
) -> dict[MemoryCategory, tuple[float, ...]]:
    """Bytes of every category on every pipeline rank, each at its rank's peak.

    Framework is what the profile says is gone before the first tensor and, on GPUs, what the caching allocator
    reserves beyond the sum of the others. On a CPU what glibc keeps of freed blocks is counted as buffers.
    """
    ranks = _allocated(model, point, stack)
    context = profile.framework_overhead_bytes.value
    columns = [(*_with_reserve(rank, profile), context + _reserve_bytes(rank, stack, profile)) for rank in ranks]
    return dict(zip(MEMORY_CATEGORIES, zip(*columns, strict=True), strict=True))


def _reserve_bytes(rank: "_Rank", stack: SoftwareStack, profile: HardwareProfile) -> float:
    return stack.allocator_reserve_frac.value * sum(rank) if profile.device == "cuda" else 0.0


def _with_reserve(rank: "_Rank", profile: HardwareProfile) -> "_Rank":
    reserve = profile.allocator_reserve_frac
    if reserve is None:
        return rank
    transient = rank.activations + rank.logits + rank.buffers
    return rank._replace(buffers=rank.buffers + reserve.value * transient)


def peak_memory_bytes(model: ModelSpec, point: Point, stack: SoftwareStack, profile: HardwareProfile) -> float:
    """Bytes of all categories on the pipeline rank that needs most."""
    by_category = memory_by_rank(model, point, stack, profile)
    sums: list[float] = [sum(column) for column in zip(*by_category.values(), strict=True)]
    return max(sums)


def memory_items(model: ModelSpec, point: Point, stack: SoftwareStack, pp_rank: int) -> list[MemoryItem]:
    """What one pipeline rank holds, component by component and tensor by tensor; all categories but framework."""
    items: list[MemoryItem] = []
    for group in rank_parameters(model, point.layout, point.pp, tp=point.tp, etp=point.etp, ep=point.ep)[pp_rank]:
        each = bytes_per_parameter(point, is_expert=group.is_expert, is_quantized=group.is_quantized)
        parts: tuple[tuple[MemoryCategory, float], ...] = (
            ("weights", each.weights),
            ("gradients", each.gradients),
            ("optimizer", each.optimizer),
        )
        items += [
            MemoryItem(category, group.component, group.component, group.num_elements * size_bytes)
            for category, size_bytes in parts
        ]
    chunks = rank_chunks(model, point.layout, point.pp)[pp_rank]
    items += _activation_items(model, point, stack, _peak_layers(model, point, stack, pp_rank, chunks))
    logits = _logit_bytes(model, point, stack, chunks)
    items.append(MemoryItem("logits", "head", "logits", logits))
    buffers = buffer_bytes(model, point, stack, _kinds(model, chunks), logits)
    transients: tuple[tuple[Component, float], ...] = (
        ("weight_gradients", buffers.weight_gradients),
        ("dispatcher", buffers.dispatcher),
        ("recompute", buffers.recompute),
        ("working_set", buffers.working_set),
    )
    items += [MemoryItem("buffers", component, component, size_bytes) for component, size_bytes in transients]
    return _merged(items)


class _Rank(NamedTuple):
    """Categories of one rank in the order of MEMORY_CATEGORIES, framework left out."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float


def _allocated(model: ModelSpec, point: Point, stack: SoftwareStack) -> list[_Rank]:
    elements = rank_elements(model, point.layout, point.pp, tp=point.tp, etp=point.etp, ep=point.ep)
    by_class = (
        bytes_per_parameter(point, is_expert=False, is_quantized=False),
        bytes_per_parameter(point, is_expert=False, is_quantized=True),
        bytes_per_parameter(point, is_expert=True, is_quantized=True),
    )
    all_chunks = rank_chunks(model, point.layout, point.pp)
    peaks = peak_counts(point.pp, point.vp, point.num_micro_batches, point.micro_batch_group_size)
    chunk_bytes: dict[Chunk, float] = {}
    transients: dict[tuple[Chunk, ...], tuple[float, float]] = {}  # logits and buffers, of which few kinds exist
    ranks = []
    for sums, chunks, states in zip(elements, all_chunks, peaks, strict=True):
        for chunk in chunks:
            if chunk not in chunk_bytes:
                chunk_bytes[chunk] = _chunk_bytes(model, point, stack, chunk)
        if chunks not in transients:
            logits = _logit_bytes(model, point, stack, chunks)
            transients[chunks] = logits, sum(buffer_bytes(model, point, stack, _kinds(model, chunks), logits))
        sizes = [chunk_bytes[chunk] for chunk in chunks]
        weights, gradients, optimizer = (sum(map(mul, sums, column)) for column in zip(*by_class, strict=True))
        activations = max([sum(map(mul, counts, sizes)) for counts in states])
        ranks.append(_Rank(weights, gradients, optimizer, activations, *transients[chunks]))
    return ranks


def _layers(chunk: Chunk) -> Iterator[tuple[ActivationKind, int]]:
    """How many of each kind of layer one chunk runs."""
    if chunk.num_dense:
        yield "dense", chunk.num_dense
    if chunk.num_moe:
        yield "moe", chunk.num_moe
    if chunk.num_mtp:
        yield "mtp", chunk.num_mtp
    if chunk.has_loss:
        yield "loss", 1


def _chunk_bytes(model: ModelSpec, point: Point, stack: SoftwareStack, chunk: Chunk) -> float:
    """Kept bytes of one micro-batch in one virtual stage, block scales included."""
    total = 0.0
    for kind, count in _layers(chunk):
        kept = kept_bytes(model, kind, point, stack)
        total += count * (kept.kept_bytes + kept.scales_bytes)
    return total


def _kinds(model: ModelSpec, chunks: tuple[Chunk, ...]) -> tuple[LayerKind, ...]:
    """Kinds of layers a rank holds, MTP depths counted as the kind of their layer."""
    found: set[LayerKind] = set()
    for chunk in chunks:
        if chunk.num_dense:
            found.add("dense")
        if chunk.num_moe:
            found.add("moe")
        if chunk.num_mtp:
            found.add(model.mtp_kind)
    return tuple(sorted(found))


def _logit_bytes(model: ModelSpec, point: Point, stack: SoftwareStack, chunks: tuple[Chunk, ...]) -> float:
    """Logits of one micro-batch, of the main head and of every MTP depth, on the rank that computes the loss."""
    if not any(chunk.has_loss for chunk in chunks):
        return 0.0
    wider = max(1.0, PRECISIONS[point.precision].activation_bytes / _LOGIT_DTYPE_BYTES)
    num_logits = point.tokens_per_rank * model.vocab_size * (1 + model.num_mtp_layers)
    return num_logits * stack.logit_bytes.value * wider


def _peak_layers(
    model: ModelSpec, point: Point, stack: SoftwareStack, pp_rank: int, chunks: tuple[Chunk, ...]
) -> dict[ActivationKind, int]:
    """Layers in flight by kind, when the rank's kept bytes peak."""
    sizes = [_chunk_bytes(model, point, stack, chunk) for chunk in chunks]
    states = peak_counts(point.pp, point.vp, point.num_micro_batches, point.micro_batch_group_size)[pp_rank]
    peak = max(states, key=lambda counts: sum(count * size for count, size in zip(counts, sizes, strict=True)))
    in_flight: dict[ActivationKind, int] = {}
    for num_micro_batches, chunk in zip(peak, chunks, strict=True):
        for kind, count in _layers(chunk):
            in_flight[kind] = in_flight.get(kind, 0) + count * num_micro_batches
    return in_flight


def _activation_items(
    model: ModelSpec, point: Point, stack: SoftwareStack, in_flight: dict[ActivationKind, int]
) -> Iterator[MemoryItem]:
    for kind, count in in_flight.items():
        for tensor in saved_tensors(model, kind, point, stack):
            if tensor.is_kept(point.recompute):
                yield MemoryItem("activations", tensor.component, tensor.name, tensor.size_bytes * count)
        scales = kept_bytes(model, kind, point, stack).scales_bytes * count
        if scales:
            yield MemoryItem("activations", "block_scales", "block scales of quantized tensors", scales)


def _merged(items: list[MemoryItem]) -> list[MemoryItem]:
    """One item for each category, component and name, in the order met, without empty ones."""
    sums: dict[tuple[MemoryCategory, Component, str], float] = {}
    for item in items:
        key = (item.category, item.component, item.name)
        sums[key] = sums.get(key, 0.0) + item.size_bytes
    return [MemoryItem(*key, total) for key, total in sums.items() if total]
