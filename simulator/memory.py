"""Peak device memory of every pipeline rank, by category and by component (report section 1)."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import mul
from typing import Literal, NamedTuple, get_args

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.model_spec import LayerKind, ModelSpec
from moeplan.point import Point
from moeplan.simulator.activations import ActivationKind
from moeplan.simulator.buffers import buffer_bytes
from moeplan.simulator.device_buffers import dispatcher_buffer_bytes
from moeplan.simulator.in_flight import peak_counts
from moeplan.simulator.layer_state import (
    chunk_bytes,
    layer_counts,
    layer_parts,
    on_device_frac,
    passing_bytes,
    waiting_bytes,
)
from moeplan.simulator.placement import Chunk, rank_chunks, rank_elements, rank_parameters
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.tensor_tables import Component
from moeplan.simulator.training_state import StateBytes, bytes_per_parameter, num_weight_copies
from moeplan.vocabulary import MEMORY_CATEGORIES, PRECISIONS, MemoryCategory

_FSDP_STATE = {"megatron-fsdp": None, "fsdp2": "fp32", "fsdp2-bf16": "bf16"}
_LOGIT_DTYPE_BYTES = 4.0  # what a stack's logit_bytes presume; the fp64 recipe doubles them

Reading = Literal["allocated", "reserved", "device"]
READINGS: tuple[Reading, ...] = get_args(Reading)


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """Bytes of one component on one pipeline rank at its peak; ``name`` tells kept tensors apart."""

    category: MemoryCategory
    component: Component
    name: str
    size_bytes: float


def memory_by_rank(
    model: ModelSpec, point: Point, stack: SoftwareStack, profile: HardwareProfile
) -> dict[MemoryCategory, tuple[float, ...]]:
    """Bytes of every category on every pipeline rank, each at its rank's peak.

    Framework is what PyTorch does not allocate (what the profile says is gone before the first tensor, the flex
    dispatcher's buffers) and, on GPUs, what its caching allocator reserves beyond the sum of the others. On a CPU what
    glibc keeps of freed blocks is counted as buffers.
    """
    ranks = _allocated(model, point, stack, num_weight_copies(point, profile))
    fixed = profile.framework_overhead_bytes.value + dispatcher_buffer_bytes(model, point, profile)
    columns = [(*_with_reserve(rank, profile), fixed + _reserve_bytes(rank, stack, profile)) for rank in ranks]
    return dict(zip(MEMORY_CATEGORIES, zip(*columns, strict=True), strict=True))


def _reserve_bytes(rank: "_Rank", stack: SoftwareStack, profile: HardwareProfile) -> float:
    return stack.allocator_reserve_frac.value * sum(rank) if profile.device == "cuda" else 0.0


def _with_reserve(rank: "_Rank", profile: HardwareProfile) -> "_Rank":
    reserve = profile.allocator_reserve_frac
    if reserve is None:
        return rank
    transient = rank.activations + rank.logits + rank.buffers
    return rank._replace(buffers=rank.buffers + reserve.value * transient)


def peak_of_reading(
    model: ModelSpec, point: Point, stack: SoftwareStack, profile: HardwareProfile, reading: Reading
) -> float:
    """Peak of the worst rank as a counter shows it: PyTorch's allocated or reserved bytes, or the device's use."""
    ranks = _allocated(model, point, stack, num_weight_copies(point, profile))
    if reading == "device":
        return peak_memory_bytes(model, point, stack, profile)
    return max(sum(rank) + (_reserve_bytes(rank, stack, profile) if reading == "reserved" else 0.0) for rank in ranks)


def peak_memory_bytes(model: ModelSpec, point: Point, stack: SoftwareStack, profile: HardwareProfile) -> float:
    """Bytes of all categories on the pipeline rank that needs most."""
    by_category = memory_by_rank(model, point, stack, profile)
    sums: list[float] = [sum(column) for column in zip(*by_category.values(), strict=True)]
    return max(sums)


def state_bytes(model: ModelSpec, point: Point, stack: SoftwareStack, profile: HardwareProfile) -> float:
    """Bytes of weights, gradients and optimizer state on the rank with most of them: no more than its peak.

    They do not depend on micro-batch, dispatcher or recompute.
    """
    return max(map(sum, _state_sums(model, point, stack, num_weight_copies(point, profile))))


def memory_items(
    model: ModelSpec, point: Point, stack: SoftwareStack, pp_rank: int, *, num_copies: int = 2
) -> list[MemoryItem]:
    """What one pipeline rank holds, component by component and tensor by tensor; all categories but framework.

    ``num_copies``: quantized copies of a weight, as :func:`moeplan.simulator.training_state.num_weight_copies` says.
    """
    state: list[MemoryItem] = []
    splits = stack.time.splits_mtp_projection
    ranks = rank_parameters(
        model, point.layout, point.pp, tp=point.tp, etp=point.etp, ep=point.ep, splits_mtp_projection=splits
    )
    for group in ranks[pp_rank]:
        each = _state_bytes(point, stack, num_copies, is_expert=group.is_expert, is_quantized=group.is_quantized)
        parts: tuple[tuple[MemoryCategory, float], ...] = (
            ("weights", each.weights),
            ("gradients", each.gradients),
            ("optimizer", each.optimizer),
        )
        state += [
            MemoryItem(category, group.component, group.component, group.num_elements * size_bytes)
            for category, size_bytes in parts
        ]
    run = _transient_items(model, point, stack, pp_rank)
    if not point.offload_optimizer_states:
        return _merged(state + run)
    while_running = [item for item in state if item.category != "optimizer"] + run
    return _merged(max(while_running, state, key=lambda items: sum(item.size_bytes for item in items)))


def _transient_items(model: ModelSpec, point: Point, stack: SoftwareStack, pp_rank: int) -> list[MemoryItem]:
    """Activations, logits and buffers of one rank."""
    chunks = rank_chunks(model, point.layout, point.pp, point.bf16_ends)[pp_rank]
    items = list(_activation_items(model, point, stack, pp_rank, chunks))
    logits = _logit_bytes(model, point, stack, chunks)
    items.append(MemoryItem("logits", "head", "logits", logits))
    buffers = buffer_bytes(model, point, stack, _kinds(model, chunks), logits)
    transients: tuple[tuple[Component, float], ...] = (
        ("weight_gradients", buffers.weight_gradients),
        ("dispatcher", buffers.dispatcher),
        ("recompute", buffers.recompute),
        ("working_set", buffers.working_set),
        ("gathered_weights", buffers.gathered_weights),
    )
    return items + [MemoryItem("buffers", component, component, size_bytes) for component, size_bytes in transients]


class _Rank(NamedTuple):
    """Categories of one rank in the order of MEMORY_CATEGORIES, framework left out."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float


def _state_bytes(
    point: Point, stack: SoftwareStack, num_copies: int, *, is_expert: bool, is_quantized: bool
) -> StateBytes:
    state = bytes_per_parameter(
        point,
        is_expert=is_expert,
        is_quantized=is_quantized,
        num_copies=num_copies,
        state_dtype=_FSDP_STATE[stack.full_sharding],
    )
    return StateBytes(state.weights, 0.0, 0.0) if stack.time.trains_adapters else state


def _state_sums(
    model: ModelSpec, point: Point, stack: SoftwareStack, num_copies: int
) -> list[tuple[float, float, float]]:
    """Weights, gradients and optimizer state of every pipeline rank."""
    splits = stack.time.splits_mtp_projection
    elements = rank_elements(
        model, point.layout, point.pp, tp=point.tp, etp=point.etp, ep=point.ep, splits_mtp_projection=splits
    )
    by_class = (
        _state_bytes(point, stack, num_copies, is_expert=False, is_quantized=False),
        _state_bytes(point, stack, num_copies, is_expert=False, is_quantized=True),
        _state_bytes(point, stack, num_copies, is_expert=True, is_quantized=True),
    )
    columns = tuple(zip(*by_class, strict=True))
    found = []
    for sums in elements:
        weights, gradients, optimizer = (sum(map(mul, sums, column)) for column in columns)
        found.append((weights, gradients, optimizer))
    return found


def _allocated(model: ModelSpec, point: Point, stack: SoftwareStack, num_copies: int) -> list[_Rank]:
    state = _state_sums(model, point, stack, num_copies)
    all_chunks = rank_chunks(model, point.layout, point.pp, point.bf16_ends)
    peaks = _peaks(point)
    sizes_of_chunk: dict[tuple[Chunk, float], float] = {}
    transients: dict[tuple[Chunk, ...], tuple[float, float, float]] = {}  # few kinds of ranks exist
    ranks = []
    for (weights, gradients, optimizer), chunks, states in zip(state, all_chunks, peaks, strict=True):
        part = on_device_frac(chunks, point.offload_layers)
        for chunk in chunks:
            if (chunk, part) not in sizes_of_chunk:
                sizes_of_chunk[chunk, part] = chunk_bytes(model, point, stack, chunk, part)
        if chunks not in transients:
            logits = _logit_bytes(model, point, stack, chunks)
            buffers = sum(buffer_bytes(model, point, stack, _kinds(model, chunks), logits))
            passing = passing_bytes(model, point, stack, chunks) + waiting_bytes(model, point, stack, chunks)
            transients[chunks] = passing, logits, buffers
        sizes = [sizes_of_chunk[chunk, part] for chunk in chunks]
        passing, logits, buffers = transients[chunks]
        activations = max([sum(map(mul, counts, sizes)) for counts in states]) + passing
        ranks.append(_Rank(weights, gradients, optimizer, activations, logits, buffers))
    return [_worse_instant(rank) for rank in ranks] if point.offload_optimizer_states else ranks


def _worse_instant(rank: _Rank) -> _Rank:
    """Under offloaded states: layers run while those are away, and in the optimizer step nothing else does."""
    running, stepping = rank._replace(optimizer=0.0), rank._replace(activations=0.0, logits=0.0, buffers=0.0)
    return max(running, stepping, key=sum)


def _peaks(point: Point) -> tuple[tuple[tuple[int, ...], ...], ...]:
    ahead = point.ep_overlap and point.pp > 1
    return peak_counts(point.pp, point.vp, point.num_micro_batches, point.micro_batch_group_size, runs_ahead=ahead)


def _kinds(model: ModelSpec, chunks: tuple[Chunk, ...]) -> tuple[LayerKind, ...]:
    """Kinds of layers a rank holds, MTP depths counted as the kind of their layer."""
    found: set[LayerKind] = set()
    for chunk in chunks:
        found.update(kind for kind, _ in chunk.layers)
        if chunk.num_mtp:
            found.add(model.mtp_kind)
    return tuple(sorted(found))


def _logit_bytes(model: ModelSpec, point: Point, stack: SoftwareStack, chunks: tuple[Chunk, ...]) -> float:
    """Logits of one micro-batch, of the main head and of every MTP depth, on the rank that computes the loss."""
    if not any(chunk.has_loss for chunk in chunks):
        return 0.0
    presumed = _LOGIT_DTYPE_BYTES if stack.logit_dtype == "fp32" else PRECISIONS["bf16"].activation_bytes
    wider = max(1.0, PRECISIONS[point.precision].activation_bytes / presumed)
    num_logits = point.tokens_per_rank * model.vocab_size * (1 + model.num_mtp_layers)
    return num_logits * stack.logit_bytes.value * wider


def _activation_items(
    model: ModelSpec, point: Point, stack: SoftwareStack, pp_rank: int, chunks: tuple[Chunk, ...]
) -> Iterator[MemoryItem]:
    device_frac = on_device_frac(chunks, point.offload_layers)
    sizes = [chunk_bytes(model, point, stack, chunk, device_frac) for chunk in chunks]
    peak = max(_peaks(point)[pp_rank], key=lambda counts: sum(map(mul, counts, sizes)))
    in_flight: dict[ActivationKind, float] = {}
    for num_micro_batches, chunk in zip(peak, chunks, strict=True):
        for kind, count in layer_counts(chunk):
            part = 1.0 if kind == "loss" else device_frac
            in_flight[kind] = in_flight.get(kind, 0) + count * num_micro_batches * part
    for kind, num_layers in in_flight.items():
        for component, name, size_bytes in layer_parts(model, kind, point, stack):
            yield MemoryItem("activations", component, name, size_bytes * num_layers)
    passing = passing_bytes(model, point, stack, chunks)
    yield MemoryItem("activations", "working_set", "layer back from the host, or begun beside a backward", passing)
    waiting = waiting_bytes(model, point, stack, chunks)
    yield MemoryItem("activations", "experts", "operands of weight gradients that wait for a micro-batch", waiting)


def _merged(items: list[MemoryItem]) -> list[MemoryItem]:
    """One item for each category, component and name, in the order met, without empty ones."""
    sums: dict[tuple[MemoryCategory, Component, str], float] = {}
    for item in items:
        key = (item.category, item.component, item.name)
        sums[key] = sums.get(key, 0.0) + item.size_bytes
    return [MemoryItem(*key, total) for key, total in sums.items() if total]
