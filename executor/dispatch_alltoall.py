"""Dispatcher ``alltoall``: one copy of a token for each of its experts, with exact counts.

In order (report section 4.3): permute, all-to-all over ep, all-gather over etp, sort by expert; the experts; the
inverse sort, reduce-scatter over etp, all-to-all, unpermute.

Shapes: L tokens of this rank, K experts per token, H hidden, R rows at this rank's experts.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from moeplan.executor.collectives import all_gather_raw, exchange_rows, gather_uneven_rows, scatter_uneven_rows
from moeplan.executor.dispatch_options import DispatchOptions
from moeplan.executor.exchange import Arrived, Tensors
from moeplan.executor.mesh import Mesh
from moeplan.executor.scopes import scope
from moeplan.kernels.permute import permute, permute_probs, unpermute
from moeplan.kernels.row_map import RowMap, padded_row_map, row_map


@dataclass(frozen=True)
class Routes:
    """Who sends how many rows where.

    ``chunk_sizes`` are rows by (etp source, ep source, local expert) as they arrive; ``order`` lists those chunks
    expert by expert.
    """

    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    etp_sizes: tuple[int, ...] = ()
    chunk_sizes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


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


@dataclass(frozen=True)
class AllToAllExchange:
    """One forward of one layer; see :class:`moeplan.executor.exchange.Exchange`."""

    mesh: Mesh
    probs_before_fc2: bool
    rows: RowMap
    routes: Routes
    offsets: Tensor

    def send(self, packed: Tensors) -> Tensors:
        """Rows, and their probabilities where those travel along."""
        return tuple(self._send(x) for x in packed)

    def arrange(self, arrived: Tensors) -> Arrived:
        """Chunks of rows by expert."""
        rows_RH, *probs = (sort_chunks(x, self.routes.chunk_sizes, self.routes.order) for x in arrived)
        is_copied = self.mesh.etp_ep.size == 1 and not self.rows.has_gaps and self.rows.row_of_slot_TK.shape[1] > 1
        return Arrived(rows_RH, probs[0] if probs else None, self.offsets, self.rows if is_copied else None)

    def collect(self, rows_RH: Tensor, probs_R: Tensor | None) -> Tensor:
        """Chunks of rows as they arrived."""
        return sort_chunks(rows_RH, *inverse_order(self.routes.chunk_sizes, self.routes.order))

    def send_back(self, rows: Tensor) -> Tensor:
        """Rows at the rank of their token."""
        rows = scatter_uneven_rows(rows, self.routes.etp_sizes, self.mesh.etp)
        return exchange_rows(rows, self.routes.receive, self.routes.send, self.mesh.ep)

    def unpack(self, rows: Tensor, probs_LK: Tensor) -> Tensor:
        """y_LH, weighed here unless the experts did."""
        with scope("permute"):
            return unpermute(rows, self.rows, None if self.probs_before_fc2 else probs_LK)

    def _send(self, x: Tensor) -> Tensor:
        x = exchange_rows(x, self.routes.send, self.routes.receive, self.mesh.ep)
        return gather_uneven_rows(x, self.routes.etp_sizes, self.mesh.etp)


class AllToAllDispatcher:
    """See the module; no token is dropped but by the router."""

    def __init__(self, options: DispatchOptions, mesh: Mesh) -> None:
        self.options, self.mesh = options, mesh

    def pack(self, x_LH: Tensor, expert_index_LK: Tensor, probs_LK: Tensor) -> tuple[Tensors, AllToAllExchange]:
        """Rows by expert, with their probabilities where the experts weigh."""
        options, capacity = self.options, self.options.padded_capacity(len(expert_index_LK))
        with scope("permute"):
            if capacity is None:
                rows = row_map(expert_index_LK, options.num_experts, has_gaps=options.drops)
            else:
                rows = padded_row_map(expert_index_LK, options.num_experts, capacity)
        if capacity is None:
            rows, routes, offsets_E = self._exchange_counts(rows)
        else:
            routes, offsets_E = self._padded_routes(capacity, rows)
        with scope("permute"):
            packed: Tensors = (permute(x_LH, rows),)
            if options.probs_before_fc2:
                packed = (*packed, permute_probs(probs_LK, rows))
        return packed, AllToAllExchange(self.mesh, options.probs_before_fc2, rows, routes, offsets_E)

    def _padded_routes(self, capacity: int, rows: RowMap) -> tuple[Routes, Tensor]:
        """Routes that depend on no routing."""
        num_ranks, num_local = self.mesh.etp_ep.size, self.options.num_experts // self.mesh.ep.size
        per_rank = (num_local * capacity,) * self.mesh.ep.size
        routes = Routes(
            send=per_rank,
            receive=per_rank,
            etp_sizes=(sum(per_rank),) * self.mesh.etp.size,
            chunk_sizes=(capacity,) * (num_ranks * num_local),
            order=_by_expert(num_ranks, num_local),
        )
        return routes, rows.offsets_E[:num_local] * num_ranks

    def _exchange_counts(self, rows: RowMap) -> tuple[RowMap, Routes, Tensor]:
        """Routes from every rank's rows per expert. The one place where the host waits for the device.

        A rank that holds every expert exchanges nothing and, unless copies are dropped, need not wait.
        """
        etp, ep = self.mesh.etp, self.mesh.ep
        if self.mesh.etp_ep.size == 1:
            rows = rows.first(int(rows.offsets_E[-1])) if rows.has_gaps else rows
            return rows, Routes(), rows.offsets_E
        with scope("dispatch"):
            counts_E = rows.num_rows_E
            gathered = all_gather_raw(counts_E, self.mesh.etp_ep).view(ep.size, etp.size, ep.size, -1)
            arriving = gathered[:, :, ep.index].transpose(0, 1)  # [etp source, ep source, local expert]
            offsets_E = arriving.sum((0, 1)).cumsum(0).to(torch.int32)
            send = counts_E.view(ep.size, -1).sum(1)
            host = torch.cat([send.to(torch.int64), arriving.flatten().to(torch.int64)]).tolist()
        sent, sizes = tuple(host[: ep.size]), tuple(host[ep.size :])
        num_local = self.options.num_experts // ep.size
        by_source = _sums(sizes, num_local)
        first = etp.index * ep.size
        routes = Routes(
            send=sent,
            receive=by_source[first : first + ep.size],
            etp_sizes=_sums(by_source, ep.size),
            chunk_sizes=sizes,
            order=_by_expert(etp.size * ep.size, num_local),
        )
        return rows.first(sum(sent)), routes, offsets_E


def _by_expert(num_ranks: int, num_local: int) -> tuple[int, ...]:
    """Chunks that came rank by rank and lie by expert, put expert by expert."""
    return tuple(rank * num_local + expert for expert in range(num_local) for rank in range(num_ranks))


def _sums(values: tuple[int, ...], run: int) -> tuple[int, ...]:
    """Sums of consecutive runs of ``run`` values."""
    ends = [0, *accumulate(values)][::run]
    return tuple(end - start for start, end in pairwise(ends))
