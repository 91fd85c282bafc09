"""Chained optimizer: one Adam for dense parameters, one for experts, one gradient norm and one clip over both.

Dense gradients are summed over dp x cp, expert gradients over edp; the loss is divided by the tokens of the global
batch, so neither needs another factor (report section 4.3). Sharding ``optimizer`` reduce-scatters gradients, updates
this rank's shard and gathers weights; ``full`` does so layer by layer, and no rank keeps more than its shard; ``none``
all-reduces and updates everything everywhere. Each class is cut into units, one a layer, where their communication
runs beside compute or must come and go with the layers.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from moeplan.executor.collectives import all_gather_raw
from moeplan.executor.copies import Copies, build_copies
from moeplan.executor.dtypes import Dtypes, plan_dtypes
from moeplan.executor.flat_buffer import FlatBuffer, Span
from moeplan.executor.fsdp import ShardedBuffer
from moeplan.executor.mesh import Group, Mesh
from moeplan.executor.model import Transformer
from moeplan.executor.optimizer_state import DecaySpan, HostPart, OffloadedPart, StatePart
from moeplan.executor.packed_on_host import OffloadedPackedPart, PackedHostPart
from moeplan.executor.packed_states import PackedPart
from moeplan.executor.primary_weights import PrimaryBuffer, split_quantized
from moeplan.executor.quantized import QuantizedWeight, quantized_of
from moeplan.executor.scopes import scope
from moeplan.executor.unit_hooks import attach_hooks
from moeplan.executor.units import Unit, class_units, layer_units
from moeplan.kernels.adam import AdamOptions
from moeplan.plan import Plan
from moeplan.run_config import RunConfig


class ClassOptimizer:
    """Adam with decoupled weight decay over one flat buffer, or over this rank's shard of it."""

    def __init__(self, unit: Unit, buffer: FlatBuffer, plan: Plan, run: RunConfig) -> None:
        self.unit, self.buffer, self.run = unit, buffer, run
        dtypes = plan_dtypes(plan)
        self.dtypes = replace(dtypes, has_main_weights=dtypes.has_main_weights and not buffer.holds_main)
        self.updated = buffer.updated
        self.parts = self._parts(plan)
        self.decays = [
            DecaySpan(span.overlap(self.updated).after(self.updated.start), decay)
            for spans, decay in ((buffer.decayed, run.weight_decay), (buffer.kept, 0.0))
            for span in spans
        ]
        self.grads = torch.empty(0)

    def _parts(self, plan: Plan) -> list[StatePart]:
        """What is updated on the host, and the rest."""
        weights, size = self.buffer.updated_weights, self.updated.size
        cut = round(plan.optimizer_cpu_frac * size / self.buffer.word) * self.buffer.word
        on_device, on_host = _part_kinds(plan, moves_weights=self.buffer.holds_main)
        kinds = ((on_host, Span(0, cut)), (on_device, Span(cut, size)))
        parts = [kind(span, span.inside(weights), self.dtypes) for kind, span in kinds if span.size]
        if isinstance(self.buffer, PrimaryBuffer) and isinstance(parts[-1], OffloadedPart | OffloadedPackedPart):
            self.buffer.moving = parts[-1].moving
        return parts

    def reduce_grads(self) -> None:
        """Sum gradients over the copies of this class; afterwards ``grads`` are those of what this rank updates."""
        for part in self.parts:
            part.fetch()
        self.grads = self.buffer.reduced_grads().to(self.dtypes.main)

    def begin_loading(self) -> None:
        """Let states be written until :meth:`take_loaded`."""
        for part in self.parts:
            part.begin_loading()

    def take_loaded(self, num_steps: int) -> None:
        """Let all ranks hold the weights that were read into the states of each, after ``num_steps`` updates."""
        for part in self.parts:
            part.take_loaded(num_steps)
        self.end_step()
        self.buffer.start_gather()

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared norm of the gradients of this class."""
        counted = self.buffer.counted.overlap(self.updated).after(self.updated.start).inside(self.grads)
        norm: Tensor = torch.linalg.vector_norm(counted)  # asking for float64 would copy the whole input on a CPU
        return norm.to(torch.float64).square()

    def update(self, lr: float, clip: float) -> None:
        """One Adam step of gradients times ``clip``; other ranks get the new weights."""
        run = self.run
        options = AdamOptions(lr, run.adam_beta1, run.adam_beta2, run.adam_eps, 0.0, clip)
        with scope("optimizer"):
            for part in self.parts:
                part.step(self.grads, self.decays, options)
        self.end_step()
        self.buffer.start_gather()
        self.drop_grads()

    def _quantized(self) -> list[QuantizedWeight]:
        found = (quantized_of(entry.parameter) for entry in self.buffer.entries)
        return [quantized for quantized in found if quantized is not None]

    def end_step(self) -> None:
        """The weights have changed: quantized copies of them are void."""
        for quantized in self._quantized():
            quantized.end_step()

    @property
    def copy_bytes(self) -> int:
        """Quantized copies of weights."""
        return sum(quantized.copy_bytes for quantized in self._quantized())

    def drop_grads(self) -> None:
        """Begin the next step."""
        with scope("optimizer"):
            self.buffer.clear_grads()
            for part in self.parts:
                part.send_away()
        self.grads = torch.empty(0)

    @property
    def state_bytes(self) -> int:
        """Both moments, and main weights where they are a copy of their own, as far as they stay on the device."""
        buffer = self.buffer
        main_bytes = buffer.main.nbytes if isinstance(buffer, PrimaryBuffer) and buffer.moving is None else 0
        return main_bytes + sum(part.device_bytes for part in self.parts)


def _part_kinds(plan: Plan, *, moves_weights: bool) -> tuple[Callable[[Span, Tensor, Dtypes], StatePart], ...]:
    """What holds states that are updated on the device, and those updated on the host."""
    is_offloaded = plan.offload_optimizer_states
    if plan.main_weight_remainders or plan.moment_dtype == "fp8":
        on_device = partial(OffloadedPackedPart, moves_weights=moves_weights) if is_offloaded else PackedPart
        both = (partial(kind, has_remainders=plan.main_weight_remainders) for kind in (on_device, PackedHostPart))
        return tuple(both)
    return partial(OffloadedPart, moves_weights=moves_weights) if is_offloaded else StatePart, HostPart


class ChainedOptimizer:
    """Both classes of a model, stepped together. Collective: all ranks make it."""

    def __init__(
        self, plan: Plan, run: RunConfig, mesh: Mesh, model: Transformer, embedding_group: Group | None
    ) -> None:
        self.plan, self.max_norm, self.world, self.device = plan, run.clip_grad_norm, mesh.world, model.table.device
        is_full, is_early = plan.sharding == "full", plan.overlap_grad_reduce or plan.overlap_param_gather
        # Apart from what layers exchange: on NCCL it would queue behind that, and overlapped exchanges have a thread.
        apart = plan.ep_overlap or ((is_early or is_full) and self.device.type == "cuda")
        dense, expert = build_copies(mesh, plan.dp_replicate, embedding_group, apart=apart)
        has_copies = max(one.shard.size * one.replica.size for one in (dense, expert)) > 1
        by_layer = has_copies and (is_full or is_early)
        dtypes = plan_dtypes(plan)
        units = layer_units(model) if by_layer else class_units(model)
        parts = split_quantized(units) if plan.fp8_primary_weights else ((unit, False) for unit in units)
        self.classes = [
            ClassOptimizer(
                unit, _buffer(unit, dtypes, plan, expert if unit.is_expert else dense, is_primary=is_primary), plan, run
            )
            for unit, is_primary in parts
        ]
        if by_layer:
            attach_hooks(model, [(one.unit, one.buffer) for one in self.classes], plan)
        self._gathers_late = by_layer and plan.overlap_param_gather

    def reduce_grads(self) -> list[float]:
        """Sum gradients over replicas; squared norm contributed by each rank of the world, each parameter once."""
        for one in self.classes:
            one.buffer.start_reduce()
        for one in self.classes:
            one.reduce_grads()
        with scope("optimizer"):
            total = torch.zeros((), dtype=torch.float64, device=self.device)  # a stage may hold no parameter
            for one in self.classes:
                total = total + one.squared_norm()
            return gather_scalars(total, self.world)

    def update(self, lr: float, norm: float) -> None:
        """One step with the gradients scaled so that their global norm is at most the run's limit (0: no limit)."""
        clip = min(1.0, self.max_norm / norm) if self.max_norm > 0 and norm > 0 else 1.0
        for one in self.classes:
            one.update(lr, clip)
        if not self._gathers_late:
            self.finish_gathers()

    def drop_grads(self) -> None:
        """Leave this step's update out."""
        for one in self.classes:
            one.drop_grads()

    def begin_loading(self) -> None:
        """As :meth:`ClassOptimizer.begin_loading`, for all."""
        for one in self.classes:
            one.begin_loading()

    def take_loaded(self, num_steps: int) -> None:
        """As :meth:`ClassOptimizer.take_loaded`, for all."""
        for one in self.classes:
            one.take_loaded(num_steps)
        self.finish_gathers()

    def finish_gathers(self) -> None:
        """Let parameters hold the weights of the last update, which else arrive beside the next forward."""
        for one in self.classes:
            one.buffer.finish_gather()

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's gradients, by the name of the whole tensor."""
        return chain.from_iterable(one.buffer.named_grads() for one in self.classes)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What of the weights this rank keeps, by the name of a whole tensor."""
        return chain.from_iterable(one.buffer.named_weights() for one in self.classes)

    @property
    def weight_bytes(self) -> int:
        """Weights that stay on this rank, and their quantized copies."""
        resident = sum(one.buffer.resident_weights.nbytes for one in self.classes)
        return resident + sum(one.copy_bytes for one in self.classes)

    @property
    def grad_bytes(self) -> int:
        return sum(one.buffer.resident_grads.nbytes for one in self.classes)

    @property
    def state_bytes(self) -> int:
        return sum(one.state_bytes for one in self.classes)


def _buffer(unit: Unit, dtypes: Dtypes, plan: Plan, copies: Copies, *, is_primary: bool) -> FlatBuffer:
    if is_primary:
        return PrimaryBuffer(unit.entries, dtypes, copies, is_sharded=plan.sharding != "none")
    if plan.sharding == "full" and copies.shard.size > 1:
        return ShardedBuffer(unit.entries, dtypes, copies)
    return FlatBuffer(unit.entries, dtypes, copies, is_sharded=plan.sharding != "none")


def gather_scalars(value: Tensor, group: Group) -> list[float]:
    """The number every rank of the group brings, in rank order. Waits for the device."""
    return [float(number) for number in all_gather_raw(value.detach().to(torch.float64).reshape(1), group).tolist()]
