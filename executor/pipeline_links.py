"""What passes between pipeline ranks: activations forward, gradients backward, in the order in which they are made.

Every link between two ranks carries one kind of message one way and has a group of its own. Receives are posted in the
sender's order and ahead of their use, so that a message travels while its receiver computes; sends never hold up the
sender. So no order of chunks can deadlock, on gloo or NCCL.

NCCL connects two ranks at their first message, and holds up the host of either until both have come to it; so each link
has one when it is made. Kernels are loaded at their first launch, which may wait for all that runs, a receive of what
this rank has yet to make among it; so on a GPU no receive is posted ahead in the first step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moeplan.executor.mesh import Mesh
from moeplan.executor.scopes import scope
from moeplan.pipeline_order import ChunkStep
from moeplan.plan import Plan

Kind = Literal["F", "B"]
# A message is named by the stage and micro-batch that made it: activations by a forward, gradients by a backward.
Message = tuple[Kind, int, int]
# Receives posted on a link beyond the one that is asked for: each holds the hidden states of one micro-batch.
NUM_AHEAD = 1


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

    def connect(self, device: torch.device, *, sends: bool) -> None:
        """The first message, of this rank or to it; returns when NCCL, or gloo, has connected both."""
        operation = dist.P2POp(
            dist.isend if sends else dist.irecv, torch.zeros(1, device=device), self.peer, self.process_group
        )
        for work in dist.batch_isend_irecv([operation]):
            work.wait()

    def post(self, wanted: Message | None, num_ahead: int, empty: Callable[[Message], Tensor]) -> None:
        """Start receives in the sender's order: up to the wanted one, and ``num_ahead`` beyond it."""
        room = num_ahead + (wanted is not None)
        while self.expected and (len(self.posted) < room or (wanted is not None and wanted not in self.posted)):
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


class PipelineLinks:
    """All links of one rank. Collective: every rank makes its own, and sends what another expects."""

    def __init__(self, plan: Plan, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> None:
        self.plan, self.rank, self.last_stage = plan, mesh.pp.index, plan.pp * plan.vp - 1
        self.dtype, self.device = dtype, device
        stages = plan.pipeline.stages
        # Hidden states that arrive at each stage.
        self.num_depths = tuple(1 + sum(stage.num_mtp for stage in stages[:index]) for index in range(len(stages)))
        self.links = _build_links(plan, mesh, device)
        self._num_ahead = NUM_AHEAD if device.type == "cpu" else 0
        self._num_tokens: Sequence[int] = ()
        self._sending: list[tuple[Tensor, list[dist.Work]]] = []

    def expect(
        self, kinds: Sequence[Kind], order: Callable[[int], Sequence[ChunkStep]], num_tokens: Sequence[int]
    ) -> None:
        """Begin a step in which every pipeline rank r sends messages of ``kinds`` in the order ``order(r)``.

        ``num_tokens``: of each micro-batch on this rank.
        """
        self._num_tokens = num_tokens
        for (kind, sender, receiver), link in self.links.items():
            if receiver == self.rank:
                link.expected = deque(self._sent_by(sender, kind, order(sender)) if kind in kinds else ())
                with scope("pp_comm"):
                    link.post(None, self._num_ahead, self._empty)

    def send(self, kind: Kind, stage: int, tensor: Tensor) -> None:
        """Send what ``stage``, of this rank, made to the stage after it (F) or before it (B)."""
        to_stage = stage + 1 if kind == "F" else stage - 1
        with scope("pp_comm"):
            tensor = tensor.contiguous()
            works = self.links[kind, self.rank, to_stage % self.plan.pp].send(tensor)
        self._sending = [(sent, left) for sent, left in self._sending if not all(work.is_completed() for work in left)]
        self._sending.append((tensor, works))

    def receive(self, kind: Kind, stage: int, index: int) -> Tensor:
        """What ``stage``, of another rank, made of micro-batch ``index``."""
        link, wanted = self.links[kind, stage % self.plan.pp, self.rank], (kind, stage, index)
        with scope("pp_comm"):
            link.post(wanted, self._num_ahead, self._empty)
        with scope("bubble"):
            return link.take(wanted)

    def finish(self) -> None:
        """End a step: wait until all that was sent has left."""
        for _, works in self._sending:
            with scope("pp_comm"):
                for work in works:
                    work.wait()
        self._sending.clear()
        self._num_ahead = NUM_AHEAD

    def _empty(self, message: Message) -> Tensor:
        """Room for a message: its shape is that of the hidden states between its two stages."""
        kind, stage, index = message
        depths = self.num_depths[stage + 1 if kind == "F" else stage]
        hidden = (depths, self._num_tokens[index], self.plan.model.hidden_size)
        return torch.empty(hidden, dtype=self.dtype, device=self.device)

    def _sent_by(self, sender: int, kind: Kind, order: Sequence[ChunkStep]) -> list[Message]:
        """What ``sender`` sends this rank, in order."""
        plan, messages = self.plan, []
        for step in order:
            stage = step.chunk * plan.pp + sender
            to_stage = stage + 1 if kind == "F" else stage - 1
            if step.kind == kind and 0 <= to_stage <= self.last_stage and to_stage % plan.pp == self.rank:
                messages.append((kind, stage, step.micro_batch))
        return messages


def _build_links(plan: Plan, mesh: Mesh, device: torch.device) -> dict[tuple[Kind, int, int], Link]:
    """By kind, sender and receiver (pipeline ranks): all that this rank sends or receives on. Collective.

    Every rank comes by its links in one order, so that none waits for another in turn.
    """
    pp, rank, links = plan.pp, mesh.pp.index, dict[tuple[Kind, int, int], Link]()
    boundaries = range(pp * plan.vp - 1) if pp > 1 else ()
    neighbours = sorted({(stage % pp, (stage + 1) % pp) for stage in boundaries})
    kinds: tuple[Kind, ...] = ("F", "B")
    for chain in mesh.folding.groups("attention", ("pp",)):
        for first, second in neighbours:
            for kind in kinds:
                sender, receiver = (first, second) if kind == "F" else (second, first)
                group = dist.new_group(sorted((chain[sender], chain[receiver])))
                if chain == mesh.pp.ranks and rank in (sender, receiver):
                    peer = chain[receiver if sender == rank else sender]
                    link = links[kind, sender, receiver] = Link(peer, group)
                    link.connect(device, sends=sender == rank)
    return links
