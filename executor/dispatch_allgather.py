"""Dispatcher ``allgather``: every rank of etp x ep gets every token, keeps the rows of its experts, and sums back.

What travels does not depend on how many experts a token has: good for few ranks and many experts a token (report
section 2.2). All-gather of tokens and probabilities; the experts; reduce-scatter of the sums over each rank's experts.

Shapes: L tokens of this rank, A = L * etp * ep of all ranks, K experts per token, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moeplan.executor.collectives import all_gather_raw, gather_rows, scatter_rows
from moeplan.executor.dispatch_options import DispatchOptions
from moeplan.executor.exchange import Tensors
from moeplan.executor.local_rows import LocalRows, local_index, local_row_map
from moeplan.executor.mesh import Group, Mesh
from moeplan.executor.scopes import scope


@dataclass(frozen=True)
class AllGatherExchange(LocalRows):
    """One forward of one layer; see :class:`moeplan.executor.exchange.Exchange`."""

    group: Group

    def send(self, packed: Tensors) -> Tensors:
        """Tokens [A, H] and probabilities [A, K] of all ranks."""
        return tuple(gather_rows(x, self.group, "dispatch") for x in packed)

    def send_back(self, rows: Tensor) -> Tensor:
        """y_LH: this rank's tokens, summed over the ranks."""
        return scatter_rows(rows, self.group, "dispatch")

    def unpack(self, rows: Tensor, probs_LK: Tensor) -> Tensor:
        """y_LH, which the way back has summed."""
        return rows


class AllGatherDispatcher:
    """See the module."""

    def __init__(self, options: DispatchOptions, mesh: Mesh) -> None:
        self.options, self.mesh = options, mesh

    def pack(self, x_LH: Tensor, expert_index_LK: Tensor, probs_LK: Tensor) -> tuple[Tensors, AllGatherExchange]:
        """Tokens and probabilities as they are; indices are gathered here, and the host waits for a count of rows."""
        options, group = self.options, self.mesh.etp_ep
        with scope("dispatch"):
            index_AK = all_gather_raw(expert_index_LK.to(torch.int32), group)
        with scope("permute"):
            num_local = options.num_experts // self.mesh.ep.size
            local_AK = local_index(index_AK, self.mesh.ep.index * num_local, num_local)
            capacity = options.padded_capacity(len(expert_index_LK), group.size)
            rows = local_row_map(local_AK, num_local, capacity)
        return (x_LH, probs_LK), AllGatherExchange(rows, options.probs_before_fc2, group)
