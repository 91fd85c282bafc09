"""Micro-batches through the pipeline: 1F1B and interleaved, in the order that the simulator follows as well.

Every link between two pipeline ranks carries one kind of message one way and has a group of its own, and receives are
posted in the sender's order. Sends never hold up the sender, so no order of chunks can deadlock, on gloo or NCCL.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moeplan.executor.mesh import Group, Mesh
from moeplan.executor.micro_batch import MicroBatch, loss_weights
from moeplan.executor.model import ModelStage, Transformer, embedding_holders
from moeplan.executor.scopes import scope
from moeplan.pipeline_order import ChunkStep, rank_order
from moeplan.plan import Plan

# A message is named by the stage and micro-batch that made it: activations by a forward, gradients by a backward.
Message = tuple[Literal["F", "B"], int, int]


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
class Link:
    """One way of one kind of message between this rank and another."""

    peer: int
    process_group: dist.ProcessGroup
    expected: deque[Message] = field(default_factory=deque)
    posted: dict[Message, tuple[Tensor, list[dist.Work]]] = field(default_factory=dict)

    def send(self, tensor: Tensor) -> list[dist.Work]:
        """Start a send; the tensor must live until the result is waited for."""
        operation = dist.P2POp(dist.isend, tensor, self.peer, self.process_group)
        return dist.batch_isend_irecv([operation])

    def post_through(self, wanted: Message, empty: Callable[[Message], Tensor]) -> None:
        """Start receives, in the sender's order, up to the wanted one."""
        while wanted not in self.posted:
            message = self.expected.popleft()
            tensor = empty(message)
            operation = dist.P2POp(dist.irecv, tensor, self.peer, self.process_group)
            self.posted[message] = (tensor, dist.batch_isend_irecv([operation]))

    def take(self, wanted: Message) -> Tensor:
        """The message, after waiting for it."""
        tensor, works = self.posted.pop(wanted)
        for work in works:
            work.wait()
        return tensor


@dataclass
class _Running:
    """A chunk between its forward and its backward."""

    start: Tensor | None
    end: Tensor
    mailbox: list[Tensor]


class Pipeline:
    """Runs all micro-batches of a step on one rank. Collective: every rank makes and runs its own."""

    def __init__(self, plan: Plan, mesh: Mesh, model: Transformer) -> None:
        self.plan, self.mesh, self.model = plan, mesh, model
        self.rank, self.last_stage = mesh.pp.index, plan.pp * plan.vp - 1
        self.dtype, self.device = model.table.dtype, model.table.device
        self.weights_P = torch.tensor(loss_weights(plan), dtype=torch.float64, device=self.device)
        self.links = self._links()
        self._running: dict[tuple[int, int], _Running] = {}
        self._batches: dict[int, MicroBatch] = {}
        self._sending: list[tuple[Tensor, list[dist.Work]]] = []
        self._loss_P = torch.zeros_like(self.weights_P)

    def run(self, micro_batch: Callable[[int], MicroBatch]) -> Tensor:
        """Forward and backward of every micro-batch; the summed loss [depths] of this rank, zero without the loss.

        ``micro_batch`` gives the ids of each, counted from 0 on this rank's dp index.
        """
        self._loss_P = torch.zeros_like(self.weights_P)
        for (kind, sender), link in self._receiving.items():
            link.expected = deque(self._sent_by(sender, kind))
        for step in self._order(self.rank):
            stage = step.chunk * self.plan.pp + self.rank
            if step.kind == "F":
                self._forward(stage, step.micro_batch, micro_batch)
            else:
                self._backward(stage, step.micro_batch)
        self._finish_sending()
        return self._loss_P

    @torch.no_grad()
    def evaluate(self, micro_batch: Callable[[int], MicroBatch]) -> Tensor:
        """As :meth:`run` without backward: the loss alone."""
        self._loss_P = torch.zeros_like(self.weights_P)
        for (kind, sender), link in self._receiving.items():
            link.expected = deque(self._sent_by(sender, kind) if kind == "F" else ())
        for step in self._order(self.rank):
            if step.kind == "F":
                self._forward(step.chunk * self.plan.pp + self.rank, step.micro_batch, micro_batch)
        self._finish_sending()
        self._running.clear()
        self._batches.clear()
        return self._loss_P

    def _finish_sending(self) -> None:
        for _, works in self._sending:
            with scope("pp_comm"):
                for work in works:
                    work.wait()
        self._sending.clear()

    def _forward(self, stage: int, index: int, micro_batch: Callable[[int], MicroBatch]) -> None:
        if index not in self._batches:
            self._batches[index] = micro_batch(index)
        start = None
        if stage > 0:
            start = self._receive("F", stage - 1, index).requires_grad_()
        out = self._module(stage)(self._batches[index], start)
        mailbox: list[Tensor] = []
        if stage == self.last_stage:
            self._loss_P += out.detach()
            end = (out * self.weights_P.to(out.dtype)).sum()
        else:
            self._send("F", stage, out.detach())
            end = cast("Tensor", _Leave.apply(out, mailbox))
        self._running[stage, index] = _Running(start, end, mailbox)

    def _backward(self, stage: int, index: int) -> None:
        running = self._running.pop((stage, index))
        if stage < self.last_stage:
            running.mailbox.append(self._receive("B", stage + 1, index))
        if running.end.requires_grad:
            running.end.backward()
        if running.start is not None:
            assert running.start.grad is not None
            self._send("B", stage, running.start.grad)
        if stage < self.plan.pp:  # the rank's first chunk: nothing needs these ids again
            del self._batches[index]

    def _module(self, stage: int) -> ModelStage:
        return cast("ModelStage", self.model.stages[stage // self.plan.pp])

    def _send(self, kind: Literal["F", "B"], stage: int, tensor: Tensor) -> None:
        to_stage = stage + 1 if kind == "F" else stage - 1
        with scope("pp_comm"):
            tensor = tensor.contiguous()
            works = self.links[kind, self.rank, to_stage % self.plan.pp].send(tensor)
        self._sending = [(sent, left) for sent, left in self._sending if not all(work.is_completed() for work in left)]
        self._sending.append((tensor, works))

    def _receive(self, kind: Literal["F", "B"], stage: int, index: int) -> Tensor:
        link, wanted = self.links[kind, stage % self.plan.pp, self.rank], (kind, stage, index)
        with scope("pp_comm"):
            link.post_through(wanted, self._empty)
        with scope("bubble"):
            return link.take(wanted)

    def _empty(self, message: Message) -> Tensor:
        """Room for a message: its shape is that of the hidden states between its two stages."""
        kind, stage, _ = message
        depths = self._num_depths[stage + 1 if kind == "F" else stage]
        hidden = (depths, self.plan.tokens_per_rank, self.plan.model.hidden_size)
        return torch.empty(hidden, dtype=self.dtype, device=self.device)

    @cached_property
    def _num_depths(self) -> tuple[int, ...]:
        """Hidden states that arrive at each stage."""
        stages = self.plan.pipeline.stages
        return tuple(1 + sum(stage.num_mtp for stage in stages[:index]) for index in range(len(stages)))

    @cached_property
    def _receiving(self) -> dict[tuple[Literal["F", "B"], int], Link]:
        """Links by kind and sender on which this rank receives."""
        return {(kind, sender): link for (kind, sender, receiver), link in self.links.items() if receiver == self.rank}

    def _order(self, rank: int) -> tuple[ChunkStep, ...]:
        plan = self.plan
        return rank_order(plan.pp, plan.vp, plan.num_micro_batches, rank, plan.micro_batch_group_size)

    def _sent_by(self, sender: int, kind: Literal["F", "B"]) -> list[Message]:
        """What ``sender`` sends this rank, in order."""
        plan, messages = self.plan, []
        for step in self._order(sender):
            stage = step.chunk * plan.pp + sender
            to_stage = stage + 1 if kind == "F" else stage - 1
            if step.kind == kind and 0 <= to_stage <= self.last_stage and to_stage % plan.pp == self.rank:
                messages.append((kind, stage, step.micro_batch))
        return messages

    def _links(self) -> dict[tuple[Literal["F", "B"], int, int], Link]:
        """By kind, sender and receiver (pipeline ranks): all that this rank sends or receives on."""
        pp, links = self.plan.pp, {}
        neighbours = sorted({(stage % pp, (stage + 1) % pp) for stage in range(self.last_stage)}) if pp > 1 else []
        kinds: tuple[Literal["F", "B"], ...] = ("F", "B")
        for chain in self.mesh.folding.groups("attention", ("pp",)):
            for first, second in neighbours:
                for kind in kinds:
                    sender, receiver = (first, second) if kind == "F" else (second, first)
                    group = dist.new_group(sorted((chain[sender], chain[receiver])))
                    if chain == self.mesh.pp.ranks and self.rank in (sender, receiver):
                        peer = chain[receiver if sender == self.rank else sender]
                        links[kind, sender, receiver] = Link(peer, group)
        return links


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
