"""Context parallelism: each rank of cp holds two chunks of every sequence, and attention sees all the others.

A sequence is cut into 2 * cp chunks, of which rank i holds i and 2 * cp - 1 - i: under a causal mask every rank then
has the same work (report section 6). Only attention looks beyond its own token; it gathers keys and values.

Shapes: B sequences of S positions, C = S / cp of them on this rank, N heads and M key-value heads, D width of a head.
"""

import torch
from torch import Tensor

from moeplan.executor.mesh import Group


def own_positions(seq_len: int, group: Group, device: torch.device) -> Tensor:
    """Positions [C] in the sequence of this rank's tokens, in the order in which it holds them."""
    positions = torch.arange(seq_len, device=device)
    if group.size == 1:
        return positions
    chunks = positions.view(2 * group.size, -1)
    return torch.cat([chunks[group.index], chunks[2 * group.size - 1 - group.index]])


def gathered_order(seq_len: int, group: Group, device: torch.device) -> Tensor:
    """Where each position [S] lies among the tokens of all ranks, one rank's after the other's."""
    chunk = seq_len // (2 * group.size)
    places = torch.arange(seq_len, device=device).view(group.size, 2, chunk)
    return torch.cat([places[:, 0].flatten(), places[:, 1].flip(0).flatten()])
