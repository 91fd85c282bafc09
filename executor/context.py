"""Context parallelism: each rank of cp holds two chunks of every sequence, and attention sees all the others.

A document is cut into 2 * cp chunks, of which rank i holds i and 2 * cp - 1 - i: under a causal mask every rank then
has the same work (report section 6). A sequence is one document, or several one after the other, none of which sees
another. Only attention and linear mixers look beyond their own token.

Shapes: B sequences of S positions, C = S / cp of them on this rank, N heads and M key-value heads, D width of a head.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.executor.attention_sink import with_sink_key
from moeplan.executor.collectives import exchange_rows, gather_rows
from moeplan.executor.mesh import Group, Mesh
from moeplan.executor.offload import offloading
from moeplan.executor.recompute import dropping_output
from moeplan.executor.ring import RingAttention
from moeplan.executor.scopes import scope
from moeplan.plan import Plan

# Of queries, keys and values, and by name the sinks of the heads (executor/attention_sink.py) where there are any.
Core = Callable[..., Tensor]


Documents = tuple[int, ...]  # lengths of those that fill a sequence, in order


def document_positions(documents: Documents, group: Group, device: torch.device) -> Tensor:
    """Positions [C] of this rank's tokens, each in its own document, in the order in which the rank holds them."""
    return torch.cat([_own_part(torch.arange(length, device=device), group) for length in documents])


def own_positions(documents: Documents, group: Group, device: torch.device) -> Tensor:
    """Positions [C] in the sequence of this rank's tokens, in the order in which it holds them."""
    places = torch.arange(sum(documents), device=device)
    return torch.cat([_own_part(part, group) for part in places.split(documents)])


def _own_part(places: Tensor, group: Group) -> Tensor:
    """This rank's two chunks of one document; the whole where it is alone."""
    if group.size == 1:
        return places
    chunks = places.view(2 * group.size, -1)
    return torch.cat([chunks[group.index], chunks[2 * group.size - 1 - group.index]])


def gathered_order(documents: Documents, group: Group, device: torch.device) -> Tensor:
    """Where each position [S] lies among the tokens of all ranks, one rank's after the other's."""
    places = torch.arange(sum(documents), device=device).view(group.size, -1)
    order = []
    for part in places.split([length // group.size for length in documents], 1):
        first, second = part.chunk(2, 1)
        order += [first.flatten(), second.flip(0).flatten()]
    return torch.cat(order)


class GatheredAttention:
    """Causal attention of this rank's queries to the keys and values of all ranks, brought together beforehand.

    ``window``: keys each query sees, itself included; None for all before it in its document.
    """

    def __init__(self, documents: Documents, window: int | None, group: Group, device: torch.device) -> None:
        self.group, self.window, self.documents = group, window, documents
        self.order = gathered_order(documents, group, device)

    def __call__(self, q_BCND: Tensor, k_BCMD: Tensor, v_BCMD: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        """out_BCND. Backward gathers again: only this rank's part is kept (report section 6)."""

        def attend(k_BMSD: Tensor, v_BMSD: Tensor) -> Tensor:
            q_BNCD = q_BCND.transpose(1, 2)
            of_documents = zip(
                q_BNCD.split([length // self.group.size for length in self.documents], 2),
                k_BMSD.split(self.documents, 2),
                v_BMSD.split(self.documents, 2),
                strict=True,
            )
            chunks = (self.group.index, 2 * self.group.size - 1 - self.group.index)
            outs = [
                self._attend(q_BNcD, k_BMLD, v_BMLD, chunk * q_BNcD.shape[2], sinks_N)
                for q_BNPD, k_BMLD, v_BMLD in of_documents
                for q_BNcD, chunk in zip(q_BNPD.chunk(2, 2), chunks, strict=True)
            ]
            return torch.cat(outs, 2).transpose(1, 2)

        return dropping_output(self._gathered, (k_BCMD, v_BCMD), attend)

    def _gathered(self, k_BCMD: Tensor, v_BCMD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions, in order."""
        both_CBMD = torch.cat([k_BCMD, v_BCMD], 3).transpose(0, 1)
        whole_SBMD = gather_rows(both_CBMD, self.group, "cp_comm")[self.order]
        k_BMSD, v_BMSD = whole_SBMD.permute(1, 2, 0, 3).split([k_BCMD.shape[3], v_BCMD.shape[3]], 3)
        return k_BMSD, v_BMSD

    def _attend(self, q_BNcD: Tensor, k_BMSD: Tensor, v_BMSD: Tensor, first: int, sinks_N: Tensor | None) -> Tensor:
        """Attention of the chunk of queries that begins at position ``first`` of a document of S keys."""
        end, scale = first + q_BNcD.shape[2], q_BNcD.shape[3] ** -0.5
        start = 0 if self.window is None else max(0, first - self.window + 1)
        k_BMSD, v_BMSD = k_BMSD[:, :, start:end], v_BMSD[:, :, start:end]
        num_sinks = 0
        if sinks_N is not None:
            queries, keys, values = (x.transpose(1, 2) for x in (q_BNcD, k_BMSD, v_BMSD))
            whole = with_sink_key(queries, keys, values, sinks_N, scale)
            q_BNcD, k_BMSD, v_BMSD = (x.transpose(1, 2) for x in whole)
            num_sinks = 1
        if self.window is None:
            # Here and not above: the module brings torch's compiler along, 145 MiB that no other process needs.
            from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415

            mask: Tensor = causal_lower_right(end - first, num_sinks + end)
        else:
            queries = torch.arange(first, end, device=q_BNcD.device)
            distance = queries[:, None] - torch.arange(start, end, device=q_BNcD.device)
            mask = F.pad((distance >= 0) & (distance < self.window), (num_sinks, 0), value=True)
        with scope("attention"):
            out_BNcD: Tensor = F.scaled_dot_product_attention(
                q_BNcD,
                k_BMSD,
                v_BMSD,
                attn_mask=mask,
                scale=scale,
                enable_gqa=q_BNcD.shape[1] != k_BMSD.shape[1],
            )
        return out_BNcD


class HeadExchange(NamedTuple):
    """From a part of the tokens to a part of the heads and back: an all-to-all for what needs whole sequences.

    ``order``: where each position lies among the tokens of all ranks of ``group``, one rank's after the other's.
    R ranks; S positions, C = S / R on each. A tuple, so that its tensors are known as those of the module that has it.
    """

    group: Group
    order: Tensor
    inverse: Tensor

    def to_heads(self, x_BCR: Tensor) -> Tensor:
        """This rank's part [B, S, ...] of all positions, in order; each rank brings parts [B, C, R, ...] for all."""
        rows = x_BCR.transpose(0, 2).flatten(0, 1)
        return self._exchanged(rows)[self.order].transpose(0, 1)

    def to_tokens(self, y_BS: Tensor) -> Tensor:
        """Parts [B, C, R, ...] of all ranks for this rank's positions; each rank brings its part [B, S, ...]."""
        rows = self._exchanged(y_BS.transpose(0, 1)[self.inverse])
        y_RCB: Tensor = rows.unflatten(0, (self.group.size, -1))
        return y_RCB.transpose(0, 2)

    def _exchanged(self, rows: Tensor) -> Tensor:
        equal = [rows.shape[0] // self.group.size] * self.group.size
        return exchange_rows(rows, equal, equal, self.group, "cp_comm")


def head_exchange(documents: Documents, group: Group, device: torch.device) -> HeadExchange:
    """Among ranks that share ``documents`` as load-balanced chunks."""
    order = gathered_order(documents, group, device)
    return HeadExchange(group, order, order.argsort())


class HeadSplitAttention:
    """Each rank brings its tokens' queries, keys and values of all heads, and attends for a part of them to all tokens.

    ``core`` is attention over what the ranks hold together: ``documents``, or a ring's part of each.
    """

    def __init__(self, documents: Documents, core: Core, group: Group, device: torch.device) -> None:
        self.core, self.group = core, group
        self.exchange = head_exchange(documents, group, device)

    def __call__(self, q_BCND: Tensor, k_BCMD: Tensor, v_BCMD: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        """out_BCND."""
        whole = tuple(self.exchange.to_heads(x.unflatten(2, (self.group.size, -1))) for x in (q_BCND, k_BCMD, v_BCMD))
        sinks = {} if sinks_N is None else {"sinks_N": sinks_N.chunk(self.group.size)[self.group.index]}
        with offloading("core_attn", *whole, rest="attn_proj"):
            out_BSnD = self.core(*whole, **sinks)
        return self.exchange.to_tokens(out_BSnD).flatten(2, 3)


def pack_attention(
    documents: Documents,
    window: int | None,
    whole: Callable[[], Core],
    group: Group,
    device: torch.device,
    *,
    gathers: bool = False,
) -> Core:
    """How a layer attends in documents that ``group`` shares; ``whole`` as in :func:`context_attention`.

    Layers with a window gather where others pass keys on: a window ends inside a block of the ring.
    """
    if group.size == 1:
        return whole()
    if window is None and not gathers:
        return RingAttention(group, documents=documents)
    return GatheredAttention(documents, window, group, device)


def context_attention(
    plan: Plan, window: int | None, whole: Callable[[], Core], mesh: Mesh, device: torch.device
) -> Core:
    """How a layer attends across ranks, by the plan's ``cp_comm``; ``whole`` makes attention over whole sequences.

    It is made only where used: its mask of a window is as large as the square of the longest document.
    Neighbours of ``mesh.cp_heads`` hold together, for their part of the heads, the two chunks of each document that a
    rank of ``mesh.cp_ring`` has: with c ranks a group, chunks c i to c i + c - 1 and as many from the other end.
    """
    heads, ring = mesh.cp_heads, mesh.cp_ring
    core = pack_attention(plan.documents, window, whole, ring, device, gathers=plan.cp_comm == "all_gather")
    if heads.size == 1:
        return core
    return HeadSplitAttention(tuple(length // ring.size for length in plan.documents), core, heads, device)
