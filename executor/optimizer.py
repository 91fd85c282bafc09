"""Chained optimizer: one Adam for dense parameters, one for experts, one gradient norm and one clip over both.

Dense gradients are summed over dp x cp, expert gradients over edp; the loss is divided by the tokens of the global
batch, so neither needs another factor (report section 4.3). Sharding ``optimizer`` reduce-scatters gradients, updates
this rank's shard and gathers weights; ``none`` all-reduces and updates everything everywhere.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from moeplan.executor.collectives import all_gather_raw
from moeplan.executor.dtypes import Dtypes
from moeplan.executor.flat_buffer import FlatBuffer, Span
from moeplan.executor.mesh import Group, Mesh
from moeplan.executor.parameters import Entry
from moeplan.executor.scopes import scope
from moeplan.run_config import RunConfig
from moeplan.vocabulary import Sharding


class ClassOptimizer:
    """Adam with decoupled weight decay over one flat buffer, or over this rank's shard of it."""

    def __init__(self, buffer: FlatBuffer, dtypes: Dtypes, run: RunConfig, sharding: Sharding) -> None:
        self.buffer, self.run, self.main_dtype = buffer, run, dtypes.main
        self.is_sharded, self.has_main_weights = sharding == "optimizer", dtypes.has_main_weights
        self.updated = buffer.own if self.is_sharded else Span(0, len(buffer.weights))
        weights = self.updated.inside(buffer.weights)
        # Without main weights the shard of the weights is updated in place.
        self.main = weights.to(dtypes.main) if dtypes.has_main_weights else weights
        self.first_moment, self.second_moment = (torch.zeros_like(self.main) for _ in range(2))
        self.num_steps = torch.zeros((), device=weights.device)
        self.decayed = [local for span in buffer.decayed if (local := self._local(span)).size]
        self.kept = [local for span in buffer.kept if (local := self._local(span)).size]
        self.grads = torch.empty(0)

    def _local(self, span: Span) -> Span:
        """The updated part of a span of the buffer, counted from the first element updated here."""
        part = span.overlap(self.updated)
        return Span(part.start - self.updated.start, part.end - self.updated.start)

    def reduce_grads(self) -> None:
        """Sum gradients over the copies of this class; afterwards ``grads`` are those of what this rank updates."""
        buffer = self.buffer
        buffer.sum_shared()
        buffer.sum_replicated()
        grads = buffer.reduce_scatter_grads() if self.is_sharded else buffer.all_reduce_grads()
        self.grads = grads.to(self.main_dtype)

    def take_main_weights(self, num_steps: int) -> None:
        """Let all ranks hold the weights that were read into ``main`` on each, after ``num_steps`` updates."""
        self.num_steps.fill_(num_steps)
        if self.has_main_weights:
            self.updated.inside(self.buffer.weights).copy_(self.main)
        if self.is_sharded:
            self.buffer.gather_weights()

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared norm of the gradients of this class."""
        counted = self._local(self.buffer.counted).inside(self.grads)
        norm: Tensor = torch.linalg.vector_norm(counted)  # asking for float64 would copy the whole input on a CPU
        return norm.to(torch.float64).square()

    def update(self, lr: float, clip: float) -> None:
        """One Adam step of gradients times ``clip``; then all ranks hold the new weights."""
        with scope("optimizer"):
            if clip != 1:
                self.grads.mul_(clip)
            self.num_steps += 1
            self._adam(self.decayed, lr, self.run.weight_decay)
            self._adam(self.kept, lr, 0.0)
            if self.has_main_weights:
                self.updated.inside(self.buffer.weights).copy_(self.main)
            self.buffer.grads.zero_()
        self.grads = torch.empty(0)
        if self.is_sharded:
            self.buffer.gather_weights()

    def _adam(self, spans: list[Span], lr: float, weight_decay: float) -> None:
        """Adam on some spans, each in one pass. torch.optim has the same step, but takes 145 MiB of imports along."""
        if not spans:
            return
        flats = (self.main, self.grads, self.first_moment, self.second_moment)
        main, grads, first, second = ([span.inside(flat) for span in spans] for flat in flats)
        torch.ops.aten._fused_adamw_(
            main,
            grads,
            first,
            second,
            [],
            [self.num_steps] * len(spans),
            lr=lr,
            beta1=self.run.adam_beta1,
            beta2=self.run.adam_beta2,
            weight_decay=weight_decay,
            eps=self.run.adam_eps,
            amsgrad=False,
            maximize=False,
        )

    @property
    def state_bytes(self) -> int:
        """Both moments, and main weights where they are a copy of their own."""
        return self.first_moment.nbytes + self.second_moment.nbytes + self.main.nbytes * self.has_main_weights


class ChainedOptimizer:
    """Both classes of a model, stepped together."""

    def __init__(
        self,
        entries: Sequence[Entry],
        dtypes: Dtypes,
        run: RunConfig,
        mesh: Mesh,
        sharding: Sharding,
        *,
        embedding_group: Group | None,
        device: torch.device,
    ) -> None:
        self.max_norm, self.world, self.device = run.clip_grad_norm, mesh.world, device
        classes = ((False, (mesh.dp_cp, mesh.tp, embedding_group)), (True, (mesh.edp, mesh.etp, None)))
        self.classes = [
            ClassOptimizer(FlatBuffer(chosen, dtypes, *groups), dtypes, run, sharding)
            for is_expert, groups in classes
            if (chosen := [entry for entry in entries if entry.is_expert == is_expert])
        ]

    def reduce_grads(self) -> list[float]:
        """Sum gradients over replicas; squared norm contributed by each rank of the world, each parameter once."""
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

    def drop_grads(self) -> None:
        """Leave this step's update out."""
        for one in self.classes:
            one.buffer.grads.zero_()
            one.grads = torch.empty(0)

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's gradients, by the name of the whole tensor."""
        return chain.from_iterable(one.buffer.named_grads() for one in self.classes)

    @property
    def weight_bytes(self) -> int:
        return sum(one.buffer.weights.nbytes for one in self.classes)

    @property
    def grad_bytes(self) -> int:
        return sum(one.buffer.grads.nbytes for one in self.classes)

    @property
    def state_bytes(self) -> int:
        return sum(one.state_bytes for one in self.classes)


def gather_scalars(value: Tensor, group: Group) -> list[float]:
    """The number every rank of the group brings, in rank order. Waits for the device."""
    return [float(number) for number in all_gather_raw(value.detach().to(torch.float64).reshape(1), group).tolist()]


def learning_rate(run: RunConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to ``min_lr_frac`` of the peak at the last step. ``step`` counts from 0."""
    if step < run.lr_warmup_steps:
        return run.lr * (step + 1) / run.lr_warmup_steps
    decay_steps = max(1, run.steps - run.lr_warmup_steps)
    progress_frac = min(1.0, (step - run.lr_warmup_steps) / decay_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress_frac))
    return run.lr * (run.min_lr_frac + (1 - run.min_lr_frac) * cosine)
