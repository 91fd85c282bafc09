"""Bringing tokens to the ranks that hold their experts, and back.

In order (report section 4.3): permute, all-to-all over ep, all-gather over etp, sort by expert; the experts; the
inverse sort, reduce-scatter over etp, all-to-all, unpermute. Every rank takes part even when no token reaches it.

Shapes: L tokens of this rank, K experts per token, H hidden, R rows at this rank's experts.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from moeplan.executor.collectives import (
    all_gather_raw,
    exchange_rows,
    gather_uneven_rows,
    scatter_uneven_rows,
)
from moeplan.executor.mesh import Mesh
from moeplan.executor.scopes import scope
from moeplan.kernels.permute import permute, permute_probs, unpermute
from moeplan.kernels.row_map import RowMap, row_map


@dataclass(frozen=True)
class Routes:
    """Who sends how many rows where, for one forward of one layer.

    ``chunk_sizes`` are rows by (etp source, ep source, local expert) as they arrive; ``order`` lists those chunks
    expert by expert.
    """

    rows: RowMap
    send: tuple[int, ...]
    receive: tuple[int, ...]
    etp_sizes: tuple[int, ...]
    chunk_sizes: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Dispatched:
    """Rows [R, H] at this rank's experts, sorted by expert, with their probabilities [R] where those travel along.

    ``offsets`` [local experts] is where the rows of each end.
    """

    rows: Tensor
    probs: Tensor | None
    offsets: Tensor
    routes: Routes


def _sort_chunks(x: Tensor, sizes: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    chunks = x.split(sizes)
    return torch.cat([chunks[index] for index in order])


class _SortChunks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
        ctx.inverse = inverse_order(sizes, order)
        with scope("permute"):
            return _sort_chunks(x, sizes, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with scope("permute"):
            return _sort_chunks(grads[0], *ctx.inverse), None, None


def inverse_order(sizes: tuple[int, ...], order: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and order that undo a sort of chunks."""
    return tuple(sizes[index] for index in order), tuple(sorted(range(len(order)), key=order.__getitem__))


def sort_chunks(x: Tensor, sizes: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Consecutive chunks of ``sizes`` rows put into ``order``."""
    if order == tuple(range(len(order))):
        return x
    return cast("Tensor", _SortChunks.apply(x, sizes, order))


class AllToAllDispatcher:
    """Dispatcher ``alltoall``: one copy of a token for each of its experts, exact counts, no token dropped."""

    def __init__(self, mesh: Mesh, num_experts: int) -> None:
        self.mesh, self.num_experts = mesh, num_experts

    def dispatch(self, x_LH: Tensor, expert_index_LK: Tensor, probs_LK: Tensor | None) -> Dispatched:
        """Rows of this rank's experts, with their probabilities where ``probs_LK`` travels along."""
        with scope("permute"):
            rows = row_map(expert_index_LK, self.num_experts)
        routes, offsets_E = self._exchange_counts(rows)
        with scope("permute"):
            rows_RH = permute(x_LH, rows)
            probs_R = None if probs_LK is None else permute_probs(probs_LK, rows)
        rows_RH = self._send(rows_RH, routes)
        if probs_R is not None:
            probs_R = self._send(probs_R, routes)
        return Dispatched(rows_RH, probs_R, offsets_E, routes)

    def combine(self, rows_RH: Tensor, routes: Routes, probs_LK: Tensor | None) -> Tensor:
        """y_LH: outputs back at their tokens and summed, weighed by ``probs_LK`` unless that happened before."""
        rows_RH = sort_chunks(rows_RH, *inverse_order(routes.chunk_sizes, routes.order))
        rows_RH = scatter_uneven_rows(rows_RH, routes.etp_sizes, self.mesh.etp)
        rows_RH = exchange_rows(rows_RH, routes.receive, routes.send, self.mesh.ep)
        with scope("permute"):
            return unpermute(rows_RH, routes.rows, probs_LK)

    def _send(self, x: Tensor, routes: Routes) -> Tensor:
        x = exchange_rows(x, routes.send, routes.receive, self.mesh.ep)
        x = gather_uneven_rows(x, routes.etp_sizes, self.mesh.etp)
        return sort_chunks(x, routes.chunk_sizes, routes.order)

    def _exchange_counts(self, rows: RowMap) -> tuple[Routes, Tensor]:
        """Routes from every rank's rows per expert. The one place where the host waits for the device.

        A rank that holds every expert exchanges nothing and need not wait.
        """
        etp, ep = self.mesh.etp, self.mesh.ep
        if self.mesh.etp_ep.size == 1:
            return Routes(rows, (), (), (), (), ()), rows.offsets_E
        with scope("dispatch"):
            counts_E = rows.num_rows_E
            gathered = all_gather_raw(counts_E, self.mesh.etp_ep).view(ep.size, etp.size, ep.size, -1)
            arriving = gathered[:, :, ep.index].transpose(0, 1)  # [etp source, ep source, local expert]
            offsets_E = arriving.sum((0, 1)).cumsum(0).to(torch.int32)
            send = counts_E.view(ep.size, -1).sum(1)
            host = torch.cat([send.to(torch.int64), arriving.flatten().to(torch.int64)]).tolist()
        sent, sizes = tuple(host[: ep.size]), tuple(host[ep.size :])
        num_local = self.num_experts // ep.size
        by_source = _sums(sizes, num_local)
        first = etp.index * ep.size
        routes = Routes(
            rows=rows,
            send=sent,
            receive=by_source[first : first + ep.size],
            etp_sizes=_sums(by_source, ep.size),
            chunk_sizes=sizes,
            order=tuple(source + expert for expert in range(num_local) for source in range(0, len(sizes), num_local)),
        )
        return routes, offsets_E


def _sums(values: tuple[int, ...], run: int) -> tuple[int, ...]:
    """Sums of consecutive runs of ``run`` values."""
    ends = [0, *accumulate(values)][::run]
    return tuple(end - start for start, end in pairwise(ends))
