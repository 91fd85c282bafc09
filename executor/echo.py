"""ECHO: hot experts get clones on ranks with room, for one forward and its backward (report section 3.5).

Weights of clones travel from their home before the tokens do; in backward their gradients travel back and are summed
there. A copy of a token goes to a clone instead of home; nothing it computes changes.

Shapes: L tokens of this rank, K experts a token, N local experts, S spare slots, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeplan.echo import Clone, EchoPlan, echo_plan
from moeplan.executor.collectives import all_gather_raw, exchange_rows
from moeplan.executor.mesh import Mesh
from moeplan.executor.scopes import scope
from moeplan.kernels.router import count_tokens
from moeplan.kernels.row_map import row_map


@dataclass(frozen=True)
class EchoWeights:
    """Both matrices of the experts in this rank's spare slots, each [S, ...]; zeros where a slot is empty."""

    in_weight: Tensor
    out_weight: Tensor


# Rows, probabilities and ends of rows of some experts to their outputs; the rank's own weights without clones.
Experts = Callable[[Tensor, Tensor | None, Tensor, EchoWeights | None], Tensor]


class Echo:
    """Clones of one layer's experts. Collective over etp x ep; the host waits once for the counts of tokens."""

    def __init__(self, mesh: Mesh, num_experts: int, num_slots: int) -> None:
        self.mesh, self.num_experts, self.num_slots = mesh, num_experts, num_slots
        self.num_local = num_experts // mesh.ep.size

    def plan(self, index_LK: Tensor) -> EchoPlan:
        """The same plan on every rank."""
        with scope("dispatch"):
            own_E = count_tokens(index_LK, self.num_experts)[0].to(torch.int64)
            counts: list[list[int]] = all_gather_raw(own_E[None], self.mesh.etp_ep).tolist()
        return echo_plan(counts, self.mesh.ep.size, self.num_slots)

    def reroute(self, index_LK: Tensor, plan: EchoPlan) -> Tensor:
        """Numbers of experts as :meth:`EchoPlan.home_id` has them, and clones for the first copies that they take."""
        with scope("permute"):
            ends, targets = self._tables(plan, index_LK.device)
            rows = row_map(index_LK, self.num_experts)
            starts_E = rows.offsets_E - rows.num_rows_E
            place_LK = rows.row_of_slot_TK - starts_E[index_LK]  # among the copies of its expert, in token order
            clone_LK = (place_LK[..., None] >= ends[index_LK]).sum(2)
            return targets[index_LK, clone_LK]

    def _tables(self, plan: EchoPlan, device: torch.device) -> tuple[Tensor, Tensor]:
        """By expert: after how many of this rank's copies each clone is full, and who takes them, home last."""
        by_expert: dict[int, list[Clone]] = {}
        for clone in plan.clones:
            by_expert.setdefault(clone.expert, []).append(clone)
        width = max(map(len, by_expert.values()), default=0)
        ends = torch.zeros(self.num_experts, width, dtype=torch.int64)
        targets = torch.tensor([plan.home_id(expert) for expert in range(self.num_experts)])[:, None].repeat(
            1, width + 1
        )
        for expert, clones in by_expert.items():
            taken = torch.tensor([clone.taken[self.mesh.etp_ep.index] for clone in clones])
            ends[expert, : len(clones)] = taken.cumsum(0)
            ends[expert, len(clones) :] = taken.sum()
            targets[expert, : len(clones)] = torch.tensor([plan.clone_id(clone) for clone in clones])
        return ends.to(device), targets.to(device)

    def fetch(self, in_NHF: Tensor, out_NFH: Tensor, plan: EchoPlan) -> EchoWeights:
        """Weights of the clones in this rank's slots; their gradients go home and are added there."""
        return EchoWeights(self._fetch(in_NHF, plan), self._fetch(out_NFH, plan))

    def run(
        self, experts: Experts, rows_RH: Tensor, probs_R: Tensor | None, offsets_X: Tensor, clones: EchoWeights | None
    ) -> Tensor:
        """``experts`` on the rows of this rank's own [N] and those of its slots [S], X = N + S in order of rows."""
        num_own = self.num_local
        if clones is None:
            return experts(rows_RH, probs_R, offsets_X[:num_own], None)
        end = int(offsets_X[num_own - 1])
        own, others = slice(0, end), slice(end, None)
        parts = [
            experts(rows_RH[own], None if probs_R is None else probs_R[own], offsets_X[:num_own], None),
            experts(rows_RH[others], None if probs_R is None else probs_R[others], offsets_X[num_own:] - end, clones),
        ]
        return torch.cat(parts)

    def _fetch(self, weight_N: Tensor, plan: EchoPlan) -> Tensor:
        own, num_ranks = self.mesh.ep.index, self.mesh.ep.size
        sent = [clone for rank in range(num_ranks) for clone in _of(plan, rank=rank) if self._home(clone) == own]
        come = [clone for home in range(num_ranks) for clone in _of(plan, rank=own) if self._home(clone) == home]
        send = [sum(clone.rank == rank for clone in sent) for rank in range(num_ranks)]
        receive = [sum(self._home(clone) == rank for clone in come) for rank in range(num_ranks)]
        places = torch.tensor([clone.expert - own * self.num_local for clone in sent], dtype=torch.int64)
        slots = torch.tensor([clone.slot for clone in come], dtype=torch.int64)
        rows = weight_N.index_select(0, places.to(weight_N.device))
        arrived = exchange_rows(rows, send, receive, self.mesh.ep)
        empty = weight_N.new_zeros((self.num_slots, *weight_N.shape[1:]))
        return empty.index_copy(0, slots.to(weight_N.device), arrived)

    def _home(self, clone: Clone) -> int:
        return clone.expert // self.num_local


def _of(plan: EchoPlan, rank: int) -> list[Clone]:
    return sorted((clone for clone in plan.clones if clone.rank == rank), key=lambda clone: clone.slot)
