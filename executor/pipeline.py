"""Micro-batches through the pipeline: 1F1B and interleaved, in the order that the simulator follows as well.

Under expert-parallel overlap each backward runs beside the forward that follows it in that order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moeplan.executor.crossing import Course, on_course
from moeplan.executor.mesh import Group, Mesh
from moeplan.executor.micro_batch import MicroBatch, StepShape
from moeplan.executor.model import ModelStage, Transformer, embedding_holders
from moeplan.executor.overlap import PairRunner
from moeplan.executor.pipeline_links import PipelineLinks
from moeplan.executor.step_graph import StepGraph
from moeplan.kernels.main_grad import main_grad_of
from moeplan.pipeline_order import ChunkStep, paired_order, rank_order
from moeplan.plan import Plan


class _Leave(Function):
    """Ends the graph of a stage: keeps nothing of the tensor that is sent, and takes its gradient from ``mailbox``."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, mailbox: list[Tensor]) -> Tensor:
        ctx.mailbox = mailbox
        return sent.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.mailbox.pop(), None


@dataclass
class _Running:
    """A chunk between its forward and its backward."""

    start: Tensor | None
    end: Tensor
    mailbox: list[Tensor]
    course: Course | None


class Pipeline:
    """Runs all micro-batches of a step of ``shape`` on one rank. Collective: every rank makes and runs its own."""

    def __init__(self, plan: Plan, mesh: Mesh, model: Transformer, shape: StepShape) -> None:
        self.plan, self.mesh, self.model = plan, mesh, model
        self.rank, self.last_stage = mesh.pp.index, plan.pp * plan.vp - 1
        table = model.table
        self.shape = shape
        self.weights_P = torch.tensor(shape.loss_weights, dtype=torch.float64, device=table.device)
        self.links = PipelineLinks(plan, mesh, table.dtype, table.device)
        self.pairs = PairRunner(table.device, delay_wgrad=plan.delay_wgrad) if plan.ep_overlap else None
        self._running: dict[tuple[int, int], _Running] = {}
        self._batches: dict[int, MicroBatch] = {}
        self._loss_P = torch.zeros_like(self.weights_P)

    def weigh(self, loss_weights: Sequence[float]) -> None:
        """Let the steps that follow have other ``loss_weights`` than the shape's."""
        self.weights_P = self.weights_P.new_tensor(loss_weights)

    def run(self, micro_batch: Callable[[int], MicroBatch]) -> Tensor:
        """Forward and backward of every micro-batch; the summed loss [depths] of this rank, zero without the loss.

        ``micro_batch`` gives the ids of each, counted from 0 on this rank's dp index.
        """
        if self.plan.cuda_graph:
            return self._graph.step(micro_batch, self.plan.num_micro_batches)
        self._loss_P = torch.zeros_like(self.weights_P)
        self.links.expect(("F", "B"), self._order, self.shape.num_tokens)
        if self.pairs is None:
            for step in self._order(self.rank):
                self._run_step(step, micro_batch)
        else:
            self._run_pairs(self.pairs, micro_batch)
        self.links.finish()
        return self._loss_P

    @cached_property
    def _graph(self) -> StepGraph:
        """Made at the first step: by then the optimizer has given every parameter its main gradient."""
        entries = self.model.table.entries
        mains = [main for entry in entries if (main := main_grad_of(entry.parameter)) is not None]
        return StepGraph(self._whole, mains, self._loss_P, num_together=2 if self.plan.paired_wgrad else 1)

    def _whole(self, batch: MicroBatch) -> Tensor:
        """Forward and backward of one micro-batch where this rank holds the whole model; its losses [depths]."""
        out: Tensor = self._module(0)(batch, None)
        (out * self.weights_P.to(out.dtype)).sum().backward()
        return out.detach()

    def _run_step(
        self, step: ChunkStep, micro_batch: Callable[[int], MicroBatch], course: Course | None = None
    ) -> None:
        stage = step.chunk * self.plan.pp + self.rank
        if step.kind == "F":
            self._forward(stage, step.micro_batch, micro_batch, course)
        else:
            self._backward(stage, step.micro_batch)

    def _run_pairs(self, pairs: PairRunner, micro_batch: Callable[[int], MicroBatch]) -> None:
        plan = self.plan
        for forward, backward in paired_order(
            plan.pp, plan.vp, self.shape.num_micro_batches, self.rank, plan.micro_batch_group_size
        ):
            course = Course()
            if forward is None or backward is None:
                self._run_step(forward or cast("ChunkStep", backward), micro_batch, course)
                continue
            running = self._running[backward.chunk * plan.pp + self.rank, backward.micro_batch]
            assert running.course is not None
            pairs.run(
                (partial(self._run_step, forward, micro_batch, course), course),
                (partial(self._run_step, backward, micro_batch), running.course),
            )

    @torch.no_grad()
    def evaluate(self, micro_batch: Callable[[int], MicroBatch]) -> Tensor:
        """As :meth:`run` without backward: the loss alone."""
        self._loss_P = torch.zeros_like(self.weights_P)
        self.links.expect(("F",), self._order, self.shape.num_tokens)
        for step in self._order(self.rank):
            if step.kind == "F":
                self._forward(step.chunk * self.plan.pp + self.rank, step.micro_batch, micro_batch)
        self.links.finish()
        self._running.clear()
        self._batches.clear()
        return self._loss_P

    def _forward(
        self, stage: int, index: int, micro_batch: Callable[[int], MicroBatch], course: Course | None = None
    ) -> None:
        if index not in self._batches:
            self._batches[index] = micro_batch(index)
        start = None
        if stage > 0:
            start = self.links.receive("F", stage - 1, index).requires_grad_()
        with on_course(course):
            out = self._module(stage)(self._batches[index], start)
        mailbox: list[Tensor] = []
        if stage == self.last_stage:
            self._loss_P += out.detach()
            end = (out * self.weights_P.to(out.dtype)).sum()
        else:
            self.links.send("F", stage, out.detach())
            end = cast("Tensor", _Leave.apply(out, mailbox))
        self._running[stage, index] = _Running(start, end, mailbox, course)

    def _backward(self, stage: int, index: int) -> None:
        running = self._running.pop((stage, index))
        if stage < self.last_stage:
            running.mailbox.append(self.links.receive("B", stage + 1, index))
        if running.end.requires_grad:
            running.end.backward()
        if running.start is not None:
            assert running.start.grad is not None
            self.links.send("B", stage, running.start.grad)
        if stage < self.plan.pp:  # the rank's first chunk: nothing needs these ids again
            del self._batches[index]

    def _module(self, stage: int) -> ModelStage:
        return cast("ModelStage", self.model.stages[stage // self.plan.pp])

    def _order(self, rank: int) -> tuple[ChunkStep, ...]:
        plan = self.plan
        return rank_order(plan.pp, plan.vp, self.shape.num_micro_batches, rank, plan.micro_batch_group_size)


def embedding_group(plan: Plan, mesh: Mesh) -> Group | None:
    """The pipeline ranks that hold the embedding, where several do and this is one of them. Collective."""
    holders, own = embedding_holders(plan), None
    if len(holders) == 1:
        return None
    for chain in mesh.folding.groups("attention", ("pp",)):
        ranks = tuple(chain[holder] for holder in holders)
        group = dist.new_group(list(ranks))
        if mesh.rank in ranks:
            own = Group(ranks, ranks.index(mesh.rank), group)
    return own
