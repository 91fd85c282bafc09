"""Context parallelism: each rank of cp holds two chunks of every sequence, and attention sees all the others.

A sequence is cut into 2 * cp chunks, of which rank i holds i and 2 * cp - 1 - i: under a causal mask every rank then
has the same work (report section 6). Only attention looks beyond its own token.

Shapes: B sequences of S positions, C = S / cp of them on this rank, N heads and M key-value heads, D width of a head.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from moeplan.executor.collectives import gather_rows
from moeplan.executor.mesh import Group
from moeplan.executor.scopes import scope


def own_positions(seq_len: int, group: Group, device: torch.device) -> Tensor:
    """Positions [C] in the sequence of this rank's tokens, in the order in which it holds them."""
    positions = torch.arange(seq_len, device=device)
    if group.size == 1:
        return positions
    chunks = positions.view(2 * group.size, -1)
    return torch.cat([chunks[group.index], chunks[2 * group.size - 1 - group.index]])


def gathered_order(seq_len: int, group: Group, device: torch.device) -> Tensor:
    """Where each position [S] lies among the tokens of all ranks, one rank's after the other's."""
    places = torch.arange(seq_len, device=device).view(group.size, 2, -1)
    return torch.cat([places[:, 0].flatten(), places[:, 1].flip(0).flatten()])


class GatheredAttention:
    """Causal attention of this rank's queries to the keys and values of all ranks, brought together beforehand.

    ``window``: keys each query sees, itself included; None for all before it.
    """

    def __init__(self, seq_len: int, window: int | None, group: Group, device: torch.device) -> None:
        self.group, self.window = group, window
        self.chunk = seq_len // (2 * group.size)
        self.order = gathered_order(seq_len, group, device)

    def __call__(self, q_BCND: Tensor, k_BCMD: Tensor, v_BCMD: Tensor) -> Tensor:
        """out_BCND."""
        both_CBMD = torch.cat([k_BCMD, v_BCMD], 3).transpose(0, 1)
        whole_SBMD = gather_rows(both_CBMD, self.group, "cp_comm")[self.order]
        k_BMSD, v_BMSD = whole_SBMD.permute(1, 2, 0, 3).split([k_BCMD.shape[3], v_BCMD.shape[3]], 3)
        q_BNCD = q_BCND.transpose(1, 2)
        chunks = (self.group.index, 2 * self.group.size - 1 - self.group.index)
        outs = [
            self._attend(q_BNcD, k_BMSD, v_BMSD, chunk * self.chunk)
            for q_BNcD, chunk in zip(q_BNCD.split(self.chunk, 2), chunks, strict=True)
        ]
        return torch.cat(outs, 2).transpose(1, 2)

    def _attend(self, q_BNcD: Tensor, k_BMSD: Tensor, v_BMSD: Tensor, first: int) -> Tensor:
        """Attention of the chunk of queries that begins at position ``first``."""
        end = first + self.chunk
        start = 0 if self.window is None else max(0, first - self.window + 1)
        if self.window is None:
            mask: Tensor = causal_lower_right(self.chunk, end)
        else:
            queries = torch.arange(first, end, device=q_BNcD.device)
            distance = queries[:, None] - torch.arange(start, end, device=q_BNcD.device)
            mask = (distance >= 0) & (distance < self.window)
        with scope("attention"):
            return F.scaled_dot_product_attention(
                q_BNcD,
                k_BMSD[:, :, start:end],
                v_BMSD[:, :, start:end],
                attn_mask=mask,
                enable_gqa=q_BNcD.shape[1] != k_BMSD.shape[1],
            )
