"""What an exchange sends on one given routing, where the closed forms of :mod:`moeplan.simulator.dispatch` are means.

Shapes: P ranks of an expert group (etp fastest, then ep), L tokens each, K experts per token.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeplan.hwprofiles.schema import DispatchBackend
from moeplan.simulator.dispatch import ExchangeBytes

Rows = NDArray[np.int64]  # [from rank, to rank], zero on the diagonal


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Experts over ep x etp ranks, the first ``ranks_per_domain`` of which share a scale-up domain, and so on."""

    num_experts: int
    ep: int
    etp: int = 1
    ranks_per_domain: int = 1

    @property
    def num_ranks(self) -> int:
        return self.ep * self.etp


def routed_rows(index: NDArray[np.int64], group: ExpertGroup, backend: DispatchBackend) -> Rows:
    """Rows that each rank sends to each other in the dispatch of one layer; the combine sends them back.

    ``index`` [P, L, K] are experts, ``num_experts`` for dropped copies. alltoall: a row a copy, among ranks of one
    place in etp (what etp then gathers is :func:`gathered_rows`). allgather: every token to every rank. deepep,
    hybridep, torch: a token once to each other domain that wants it, to the rank of equal place there, and from that
    rank once to each rank of the domain that does.
    """
    num_ranks, num_tokens = index.shape[:2]
    rows: Rows
    if backend == "allgather":
        rows = np.full((num_ranks, num_ranks), num_tokens, dtype=np.int64)
    elif backend == "alltoall":
        rows = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        for source in range(num_ranks):
            for ep, copies in enumerate(_copies_by_ep(index[source], group)):
                rows[source, ep * group.etp + source % group.etp] = copies
    else:
        rows = _deduplicated_rows(index, group)
    np.fill_diagonal(rows, 0)
    return rows


def gathered_rows(index: NDArray[np.int64], group: ExpertGroup) -> NDArray[np.int64]:
    """Rows that the ranks [ep] of one ep index gather over etp after an all-to-all, each share as long as the longest.

    The message of that all-gather, in the convention of CollectiveCurve.
    """
    by_source = np.array([_copies_by_ep(own, group) for own in index])  # [P, ep]
    shares = by_source.reshape(group.ep, group.etp, group.ep).sum(0)  # [place in etp, ep]
    longest: NDArray[np.int64] = group.etp * shares.max(0)
    return longest


def routed_bytes(rows: Rows, row_bytes: float, ranks_per_domain: int) -> list[ExchangeBytes]:
    """Bytes that each rank sends inside its domain and to others."""
    domain = np.arange(len(rows)) // ranks_per_domain
    is_inside = domain[:, None] == domain
    inside, outside = (rows * is_inside).sum(1), (rows * ~is_inside).sum(1)
    return [
        ExchangeBytes(float(near) * row_bytes, float(far) * row_bytes)
        for near, far in zip(inside, outside, strict=True)
    ]


def _copies_by_ep(index: NDArray[np.int64], group: ExpertGroup) -> NDArray[np.int64]:
    """Copies that go to each ep rank."""
    ranks = index.reshape(-1) // (group.num_experts // group.ep)
    return np.bincount(ranks, minlength=group.ep + 1)[: group.ep].astype(np.int64)


def _deduplicated_rows(index: NDArray[np.int64], group: ExpertGroup) -> Rows:
    num_ranks, inside = group.num_ranks, group.ranks_per_domain
    wanted = np.zeros((*index.shape[:2], group.ep + 1), dtype=bool)
    np.put_along_axis(wanted, index // (group.num_experts // group.ep), values=True, axis=2)
    by_rank = np.repeat(wanted[:, :, : group.ep], group.etp, axis=2)
    by_domain = np.any(by_rank.reshape(num_ranks, -1, num_ranks // inside, inside), axis=3)
    rows = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for source in range(num_ranks):
        for domain in range(num_ranks // inside):
            first, relay = domain * inside, domain * inside + source % inside
            rows[source, relay] += np.count_nonzero(by_domain[source, :, domain])
            rows[relay, first : first + inside] += by_rank[source, :, first : first + inside].sum(0)
    return rows
