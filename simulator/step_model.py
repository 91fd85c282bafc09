"""Step time of plans of one model on one stack and machine; costs of parts are kept by what they depend on."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import log2
from typing import Literal

import numpy as np

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.layout import PipelineLayout
from moeplan.model_spec import LayerKind, ModelSpec
from moeplan.pipeline_order import num_warmup_forwards
from moeplan.point import Point
from moeplan.simulator.backward_ops import backward_ops
from moeplan.simulator.collectives import collective_cost
from moeplan.simulator.data_parallel import StepEnds, exposed_seconds, step_ends
from moeplan.simulator.graph import FAMILY_INDEX, Array, PhaseTime, phase_time
from moeplan.simulator.layer_ops import forward_ops
from moeplan.simulator.offload import stage_offloaded_bytes, transfer_seconds
from moeplan.simulator.op_shapes import OpShape, Part
from moeplan.simulator.overlap import NO_SAVING, PairSaving, paired_frac, paired_saving, slowed_frac
from moeplan.simulator.rank_groups import rank_groups
from moeplan.simulator.recurrence import PipelineTime, pipeline_time
from moeplan.simulator.stack import SoftwareStack

HOST, BUBBLE = FAMILY_INDEX["host"], FAMILY_INDEX["bubble"]
PP_COMM, DP_COMM, OPTIMIZER = FAMILY_INDEX["pp_comm"], FAMILY_INDEX["dp_comm"], FAMILY_INDEX["optimizer"]
Order = tuple[int, int, int, int | None]
# A layout string, how many layers at each end stay in bf16, and whether MTP depths do.
LayoutKey = tuple[str, int, int, bool]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of a plan.

    ``total_s`` and ``exposed_s`` are by family, in the order of OP_FAMILIES, means over pipeline ranks; ``exposed_s``,
    the bubble included, adds up to ``step_s``. ``forward_s`` and ``backward_s`` are of each stage's chunk.
    """

    step_s: float
    total_s: Array
    exposed_s: Array
    forward_s: Array
    backward_s: Array
    send_s: float


@dataclass(frozen=True, slots=True)
class PartTime:
    """Forward and backward of one part."""

    forward: PhaseTime
    backward: PhaseTime


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Durations of a plan's chunks and its family seconds of one micro-batch, (stages, ...)."""

    forward_s: Array
    backward_s: Array
    total_s: Array
    exposed_s: Array
    send_s: float


@dataclass(eq=False)
class StepModel:
    """Costs one model on one stack and machine. Holds caches and nothing else that changes."""

    model: ModelSpec
    stack: SoftwareStack
    profile: HardwareProfile
    _parts: dict[tuple[Part, OpShape], PartTime] = field(default_factory=dict)
    _forwards: dict[tuple[Part, OpShape], PhaseTime] = field(default_factory=dict)
    _saved: dict[tuple[Part, OpShape, bool], PairSaving] = field(default_factory=dict)
    _stages: dict[LayoutKey, tuple[dict[Part, int], ...]] = field(default_factory=dict)
    _part_counts: dict[LayoutKey, tuple[list[Part], Array]] = field(default_factory=dict)
    _ends: dict[tuple[object, ...], tuple[StepEnds, ...]] = field(default_factory=dict)

    def step_times(self, points: Sequence[Point]) -> list[StepTime]:
        """Step time of every point, in order; points of one pipeline order are evaluated together."""
        chunks = [self._chunks(point) for point in points]
        by_order: dict[Order, list[int]] = defaultdict(list)
        for index, point in enumerate(points):
            by_order[point.pp, point.vp, point.num_micro_batches, point.micro_batch_group_size].append(index)
        results: dict[int, StepTime] = {}
        for order, indices in by_order.items():
            batch = [chunks[index] for index in indices]
            forward = np.stack([one.forward_s for one in batch] * 2)
            backward = np.stack([one.backward_s for one in batch] * 2)
            sends = [one.send_s for one in batch]
            # The second half travels in no time: the difference is what sends expose.
            times = pipeline_time(order, forward, backward, np.array(sends + [0.0] * len(sends)))
            for row, index in enumerate(indices):
                results[index] = self._assemble(points[index], batch[row], times, row, row + len(indices))
        return [results[index] for index in range(len(points))]

    def part_time(self, part: Part, shape: OpShape) -> PartTime:
        """Forward and backward of a part."""
        shape = shape.of_layer(part)
        key = (part, shape)
        if key not in self._parts:
            ops = forward_ops(self.model, part, shape, self.stack)
            time = self.stack.time
            plain = (part, replace(shape, recompute=()))  # what backward makes again is no matter of forward
            if plain not in self._forwards:
                self._forwards[plain] = phase_time(ops, self.profile, time, shape.cuda_graph)
            forward = self._forwards[plain]
            backward = phase_time(backward_ops(ops, shape, time), self.profile, time, shape.cuda_graph)
            self._parts[key] = PartTime(forward, backward)
        return self._parts[key]

    def saving(self, part: Part, shape: OpShape, point: Point) -> PairSaving:
        """What a pair of one part's forward and backward saves by overlap."""
        if part.layer_kind is None or part.layer_kind.mlp != "moe" or not point.ep_overlap:
            return NO_SAVING
        shape = shape.of_layer(part)
        key = (part, shape, point.delay_wgrad)
        if key not in self._saved:
            time = self.part_time(part, shape)
            contention = self.stack.time.exchange_contention_frac.value
            slowed = slowed_frac(self.profile, shape.backend, contention, shape.dispatch_sms)
            self._saved[key] = paired_saving(time.forward, time.backward, slowed, delay_wgrad=point.delay_wgrad)
        return self._saved[key]

    def phase(self, point: Point, part: Part, kind: Literal["F", "B"]) -> PhaseTime:
        """Forward or backward of one part of a plan, with its ops."""
        time = self.part_time(part, OpShape.of(point, self.stack, self.profile))
        return time.forward if kind == "F" else time.backward

    def stage_parts(self, point: Point) -> tuple[dict[Part, int], ...]:
        """Parts of every virtual stage with their counts."""
        key = _layout_key(point)
        if key not in self._stages:
            self._stages[key] = _stage_parts(self.model, *key)
        return self._stages[key]

    def step_ends(self, point: Point) -> tuple[StepEnds, ...]:
        """Gradient reduction, parameter gathering and optimizer of every pipeline rank."""
        key = (
            *(point.num_gpus, point.layout, point.tp, point.cp, point.pp, point.etp, point.ep),
            *(point.precision, point.sharding, point.grad_dtype, point.moment_dtype, point.fp8_primary_weights),
            *(point.offload_optimizer_states, point.optimizer_cpu_frac, point.dp_replicate),
            point.main_weight_remainders,
            point.num_micro_batches if point.sharding == "full" else 0,
        )
        if key not in self._ends:
            self._ends[key] = step_ends(self.model, point, self.stack.time, self.profile)
        return self._ends[key]

    def least_step_s(self, point: Point) -> float:
        """Lower bound of the step: on every rank, the fill, its own chunks and the drain, with no message in between.

        A rank's first forward waits for one of each earlier rank, and its last backward is followed by theirs; what
        comes once a step, sends and what goes to the host are left out.
        """
        shape = OpShape.of(point, self.stack, self.profile)
        parts, counts = self._counts(point)
        times = [self.part_time(part, shape) for part in parts]
        forward = counts @ np.array([one.forward.seconds for one in times])
        backward = counts @ np.array([one.backward.seconds for one in times])
        saved = counts @ np.array([self.saving(part, shape, point).seconds for part in parts]) * self._paired(point)
        stages = (forward + backward - saved) * self._slowest(point, shape)
        busy = stages.reshape(point.vp, point.pp).sum(axis=0) * point.num_micro_batches
        before = stages[: point.pp].cumsum() - stages[: point.pp]
        return float((busy + before).max())

    def _slowest(self, point: Point, shape: OpShape) -> float:
        """Hosts do not run alike; where one graph is the iteration they hardly matter."""
        jitter_frac = 0.0 if shape.is_device_driven else self.stack.time.jitter_frac.value
        return 1 + jitter_frac * log2(point.num_gpus)

    def _counts(self, point: Point) -> tuple[list[Part], Array]:
        """The kinds of parts of a layout, and how many of each every virtual stage holds, (stages, kinds)."""
        key = _layout_key(point)
        if key not in self._part_counts:
            stages = self.stage_parts(point)
            parts = list(dict.fromkeys(part for stage in stages for part in stage))
            counts = np.array([[stage.get(part, 0) for part in parts] for stage in stages], dtype=float)
            self._part_counts[key] = parts, counts
        return self._part_counts[key]

    def _chunks(self, point: Point) -> _Chunks:
        shape = OpShape.of(point, self.stack, self.profile)
        stages = self.stage_parts(point)
        parts, counts = self._counts(point)
        times = [self.part_time(part, shape) for part in parts]
        forward = counts @ np.array([one.forward.seconds for one in times])
        backward = counts @ np.array([one.backward.seconds for one in times])
        total = counts @ np.array([one.forward.total_s + one.backward.total_s for one in times])
        exposed = counts @ np.array([one.forward.exposed_s + one.backward.exposed_s for one in times])
        savings = np.array([self.saving(part, shape, point).exposed_s for part in parts])
        saved = counts @ savings * self._paired(point)[:, None]
        sent = stage_offloaded_bytes(self.model, point, self.stack, stages)
        slowest = self._slowest(point, shape)
        left = 1 - saved.sum(axis=1) / np.maximum(forward + backward, 1e-12)  # a stage may be empty
        forward, backward = forward * left * slowest, backward * left * slowest
        to_host, back = (transfer_seconds(sent, busy, self.profile) for busy in (forward, backward))
        forward, backward = forward + to_host, backward + back
        total += np.maximum(-saved, 0.0)
        exposed, total = (exposed - saved) * slowest, total * slowest
        exposed[:, HOST] += to_host + back
        total[:, HOST] += to_host + back
        tokens = point.tokens_per_rank
        message = tokens * self.model.hidden_size * shape.element_bytes
        send = collective_cost("send_recv", message, rank_groups(point, self.profile).pp, self.profile)
        return _Chunks(forward, backward, total, exposed, send.seconds)

    def _paired(self, point: Point) -> Array:
        """By stage: the part of its chunks that run beside one of the other direction; 0 where overlap cannot run."""
        if not point.ep_overlap or (point.pp > 1 and point.vp == 1):
            return np.zeros(point.pp * point.vp)
        group = point.pp if point.micro_batch_group_size is None else point.micro_batch_group_size
        return _paired_fracs(point.pp, point.vp, point.num_micro_batches, group)

    def _assemble(self, point: Point, chunks: _Chunks, times: PipelineTime, row: int, row_without: int) -> StepTime:
        """Pipeline, then what comes once a step: the slowest rank's exposed reduction, optimizer and gathering."""
        ends = self.step_ends(point)
        gather, reduce = _exposed_ends(point, chunks, ends)
        optimizer = np.array([end.optimizer_s for end in ends])
        pipeline_s, finished = times.step_s[row], times.end_s[row]
        ended = float((finished + reduce).max())
        step_s = ended + float(gather.max()) + float(optimizer.max())
        sends = 2 * point.num_micro_batches * (point.pp * point.vp - 1) / point.pp * chunks.send_s
        micro_batches, pp = point.num_micro_batches, point.pp
        total = chunks.total_s.sum(axis=0) * micro_batches / pp
        exposed = chunks.exposed_s.sum(axis=0) * micro_batches / pp
        total[DP_COMM] = float(np.mean([end.reduce_s + end.gather_s for end in ends]))
        exposed[DP_COMM] = max(0.0, ended - float(pipeline_s)) + float(gather.max())
        total[OPTIMIZER] = exposed[OPTIMIZER] = float(optimizer.mean())
        once = self.stack.time.step_host_s
        if once is not None and self.profile.device == "cuda":
            step_s += once.value
            total[HOST] += once.value
            exposed[HOST] += once.value
        total[PP_COMM] = sends
        exposed[PP_COMM] = float(pipeline_s - times.step_s[row_without])
        total[BUBBLE] = exposed[BUBBLE] = step_s - float(exposed.sum())
        return StepTime(step_s, total, exposed, chunks.forward_s, chunks.backward_s, chunks.send_s)


@lru_cache(maxsize=4096)
def _paired_fracs(pp: int, vp: int, num_micro_batches: int, group: int) -> Array:
    fracs = [
        paired_frac(pp, vp, num_micro_batches, num_warmup_forwards(pp, vp, num_micro_batches, group, rank))
        for rank in range(pp)
    ]
    return np.array(fracs * vp)


def _layout_key(point: Point) -> LayoutKey:
    return point.layout, *point.bf16_ends, "mtp" in point.bf16_modules


def _stage_parts(
    model: ModelSpec,
    layout: str,
    num_first: int,
    num_last: int,
    has_bf16_mtp: bool,  # noqa: FBT001 - a LayoutKey
) -> tuple[dict[Part, int], ...]:
    kinds = model.kinds_with_bf16(num_first, num_last)
    mtp_kind = model.mtp_kind._replace(is_bf16=has_bf16_mtp)
    like: dict[tuple[LayerKind, bool], Part] = {}
    stages = []
    for stage in PipelineLayout.from_string(layout).stages:
        counts: dict[Part, int] = defaultdict(int)
        if stage.has_embedding:
            counts[Part("embedding")] += 1
        for layer in stage.layers:
            key = (kinds[layer], model.is_windowed(layer))
            counts[like.setdefault(key, Part(kinds[layer], layer))] += 1
        if stage.num_mtp:
            last = model.num_layers - 1
            key = (mtp_kind, model.is_windowed(last))
            counts[Part("mtp")] += stage.num_mtp
            counts[like.setdefault(key, Part(mtp_kind, last))] += stage.num_mtp
        if stage.has_loss:  # Megatron projects and scores the hidden states of all depths there (report section 8)
            counts[Part("loss")] += 1 + model.num_mtp_layers
        stages.append(dict(counts))
    return tuple(stages)


def _exposed_ends(point: Point, chunks: _Chunks, ends: Sequence[StepEnds]) -> tuple[Array, Array]:
    """Exposed parameter gathering and gradient reduction of every pipeline rank."""
    by_rank = (
        chunks.forward_s.reshape(point.vp, point.pp).sum(axis=0),
        chunks.backward_s.reshape(point.vp, point.pp).sum(axis=0),
    )
    group = min(point.pp, point.num_micro_batches) if point.vp > 1 else 1
    num_chunks = point.vp if point.pp > 1 else PipelineLayout.from_string(point.layout).num_layers
    if point.sharding == "full":
        return _exposed_full_sharding(point, by_rank, ends)
    gather = [
        exposed_seconds(end.gather_s, window * group, num_chunks, overlap=point.overlap_param_gather)
        for end, window in zip(ends, by_rank[0], strict=True)
    ]
    reduce = [
        exposed_seconds(end.reduce_s, window * group, num_chunks, overlap=point.overlap_grad_reduce)
        for end, window in zip(ends, by_rank[1], strict=True)
    ]
    return np.array(gather), np.array(reduce)


def _exposed_full_sharding(point: Point, by_rank: tuple[Array, Array], ends: Sequence[StepEnds]) -> tuple[Array, Array]:
    """Gathering and reducing layer by layer beside all compute: what exceeds it, and the first layer's gather."""
    num_layers = PipelineLayout.from_string(point.layout).num_layers / point.pp
    exposed = [
        exposed_seconds(
            end.gather_s + end.reduce_s,
            window * point.num_micro_batches * num_layers / max(num_layers - 1, 1),
            max(2, int(num_layers)) * 3 * point.num_micro_batches,
            overlap=point.overlap_param_gather and point.overlap_grad_reduce,
        )
        for end, window in zip(ends, by_rank[0] + by_rank[1], strict=True)
    ]
    return np.zeros(point.pp), np.array(exposed)


@lru_cache(maxsize=8)
def _model_of(key: "_Identity") -> StepModel:
    return StepModel(key.model, key.stack, key.profile)


class _Identity:
    """Three objects compared by identity: hashing whole profiles would cost more than a prediction."""

    def __init__(self, model: ModelSpec, stack: SoftwareStack, profile: HardwareProfile) -> None:
        self.model, self.stack, self.profile = model, stack, profile

    def __hash__(self) -> int:
        return hash((id(self.model), id(self.stack), id(self.profile)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Identity)
            and self.model is other.model
            and self.stack is other.stack
            and self.profile is other.profile
        )


def step_model(model: ModelSpec, stack: SoftwareStack, profile: HardwareProfile) -> StepModel:
    """The step model of these objects, the same one as last time."""
    return _model_of(_Identity(model, stack, profile))
