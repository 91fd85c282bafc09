"""Dispatcher ``flex``, back end ``torch``: one copy of a token for each distinct host, then for each distinct rank.

The exchange of DeepEP and HybridEP on collectives of torch.distributed (report section 2.2). A token goes once to each
other host that has one of its experts, to the rank of equal place there, which passes it on inside; every rank of etp
gets it. Outputs are summed on the same way back. All ranks' indices are gathered first, from which each rank works out
its routes alone.

Shapes: L tokens of this rank, K experts per token, P ranks of etp x ep: N hosts of M. A token held here for passing on
is one of B, one that arrived at its experts one of A.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moeplan.executor.collectives import all_gather_raw, exchange_rows
from moeplan.executor.dispatch_options import DispatchOptions
from moeplan.executor.domains import ranks_per_domain
from moeplan.executor.exchange import Tensors
from moeplan.executor.local_rows import LocalRows, local_index, local_row_map
from moeplan.executor.mesh import Group, Mesh
from moeplan.executor.scopes import scope
from moeplan.kernels.permute import permute, unpermute
from moeplan.kernels.row_map import RowMap, row_map


@dataclass(frozen=True)
class Level:
    """One exchange: copies by destination, and how many rows go to and come from each rank of the group."""

    rows: RowMap
    send: tuple[int, ...]
    receive: tuple[int, ...]
    group: Group

    def copy(self, x: Tensor) -> Tensor:
        """A copy of each row for each of its destinations."""
        with scope("permute"):
            return permute(x, self.rows)

    def there(self, x: Tensor) -> Tensor:
        """Copies at their destinations."""
        return exchange_rows(x, self.send, self.receive, self.group)

    def back(self, x: Tensor) -> Tensor:
        """Copies where they came from."""
        return exchange_rows(x, self.receive, self.send, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over each row's copies."""
        with scope("permute"):
            return unpermute(x, self.rows)


@dataclass(frozen=True)
class FlexExchange(LocalRows):
    """One forward of one layer; see :class:`moeplan.executor.exchange.Exchange`. ``levels``: hosts, then ranks."""

    levels: tuple[Level, ...]

    def send(self, packed: Tensors) -> Tensors:
        """Tokens [A, H] and probabilities [A, K] that have an expert here."""
        return tuple(self._send(x) for x in packed)

    def _send(self, x: Tensor) -> Tensor:
        first, *rest = self.levels
        x = first.there(x)
        for level in rest:
            x = level.there(level.copy(x))
        return x

    def send_back(self, rows: Tensor) -> Tensor:
        """Sums over the ranks of each host, at the rank of the token."""
        first, *rest = self.levels
        for level in reversed(rest):
            rows = level.sum(level.back(rows))
        return first.back(rows)

    def unpack(self, rows: Tensor, probs_LK: Tensor) -> Tensor:
        """y_LH: the sum over hosts."""
        return self.levels[0].sum(rows)


class FlexDispatcher:
    """See the module."""

    def __init__(self, options: DispatchOptions, mesh: Mesh) -> None:
        self.options, self.mesh = options, mesh
        group = mesh.etp_ep
        self.num_inside = ranks_per_domain(group.ranks)
        self.num_hosts = group.size // self.num_inside
        self.host, self.place = divmod(group.index, self.num_inside)

    def pack(self, x_LH: Tensor, expert_index_LK: Tensor, probs_LK: Tensor) -> tuple[Tensors, FlexExchange]:
        """A copy of each token and its probabilities for each distinct host (rank, on one host) of its experts."""
        exchange = self._routes(expert_index_LK)
        first = exchange.levels[0]
        return (first.copy(x_LH), first.copy(probs_LK)), exchange

    def _routes(self, expert_index_LK: Tensor) -> FlexExchange:
        """Work out every route from the indices of all ranks; the host waits once, for counts."""
        options, group, ep = self.options, self.mesh.etp_ep, self.mesh.ep
        num_local, num_tokens = options.num_experts // ep.size, len(expert_index_LK)
        with scope("dispatch"):
            index_PLK = all_gather_raw(expert_index_LK.to(torch.int32), group)
        with scope("permute"):
            wanted = _wanted(index_PLK, num_local, ep.size).repeat_interleave(self.mesh.etp.size, 1)
            wanted_NMLNM = wanted.view(self.num_hosts, self.num_inside, num_tokens, self.num_hosts, self.num_inside)
            local = local_index(index_PLK, ep.index * num_local, num_local)
            by_host, here = wanted_NMLNM.any(4), wanted_NMLNM[:, :, :, self.host]
            counts = self._counts(by_host, here, (local < num_local).sum())
            levels = self._levels(by_host, here, counts)
            # Tokens arrive by the place that passed them on, then by host.
            order = _true_first(here[..., self.place].transpose(0, 1), sum(levels[-1].receive))
            arriving = local.view(self.num_hosts, self.num_inside, num_tokens, -1).transpose(0, 1).flatten(0, 2)
            capacity = options.padded_capacity(num_tokens, group.size)
            rows = local_row_map(arriving[order], num_local, capacity, counts.rows)
        return FlexExchange(rows, options.probs_before_fc2, levels)

    def _counts(self, by_host: Tensor, here: Tensor, num_rows: Tensor) -> "_Counts":
        inside_MM = here.sum((0, 2))
        parts = (
            by_host[self.host, self.place].sum(0),
            by_host[:, self.place, :, self.host].sum(1),
            inside_MM[self.place],
            inside_MM[:, self.place],
            num_rows[None],
        )
        host = iter(torch.cat(parts).tolist())
        to_hosts, from_hosts, to_places, from_places, rows = (tuple(next(host) for _ in part) for part in parts)
        return _Counts(to_hosts, from_hosts, to_places, from_places, rows[0])

    def _levels(self, by_host: Tensor, here: Tensor, counts: "_Counts") -> tuple[Level, ...]:
        """One exchange across hosts and one inside, or the one of them that there is."""
        levels: tuple[Level, ...] = ()
        group, size, inside = self.mesh.etp_ep, self.mesh.etp_ep.size, self.num_inside
        held = here[:, self.place].flatten(0, 1)  # tokens at this place: by host they come from, the places they go to
        if self.num_hosts > 1:
            places = slice(self.place, size, inside)
            rows = _copies(by_host[self.host, self.place], sum(counts.to_hosts))
            levels = (Level(rows, _at(counts.to_hosts, places, size), _at(counts.from_hosts, places, size), group),)
            held = held[_true_first(by_host[:, self.place, :, self.host], sum(counts.from_hosts))]
        if inside > 1 or self.num_hosts == 1:
            places = slice(self.host * inside, (self.host + 1) * inside)
            rows = _copies(held, sum(counts.to_places))
            sizes = _at(counts.to_places, places, size), _at(counts.from_places, places, size)
            levels = (*levels, Level(rows, *sizes, group))
        return levels


@dataclass(frozen=True)
class _Counts:
    """Tokens this rank sends to each host and gets from it, the same for places on its host, and its experts' rows."""

    to_hosts: tuple[int, ...]
    from_hosts: tuple[int, ...]
    to_places: tuple[int, ...]
    from_places: tuple[int, ...]
    rows: int


def _wanted(index: Tensor, num_local: int, ep: int) -> Tensor:
    """Whether each token of [tokens, K] has an expert on each rank [tokens, ep]."""
    wanted = torch.zeros(len(index), ep + 1, dtype=torch.bool, device=index.device)  # the last: dropped copies
    return wanted.scatter_(1, (index // num_local).long(), value=True)[:, :ep]


def _copies(wanted: Tensor, num_rows: int) -> RowMap:
    """The map of rows [B, D] to one copy for each destination that wants it, by destination."""
    num_bins = wanted.shape[1]
    bins = torch.arange(num_bins, dtype=torch.int32, device=wanted.device)
    return row_map(torch.where(wanted, bins, num_bins), num_bins, has_gaps=True).first(num_rows)


def _true_first(mask: Tensor, num_true: int) -> Tensor:
    """Flat indices of the true elements, in order, where their number is known: no wait."""
    return torch.sort((~mask).flatten().to(torch.uint8), stable=True).indices[:num_true]


def _at(values: tuple[int, ...], places: slice, size: int) -> tuple[int, ...]:
    """Values at ``places`` of ``size``, zero elsewhere."""
    spread = [0] * size
    spread[places] = values
    return tuple(spread)
