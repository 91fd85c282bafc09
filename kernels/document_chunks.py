"""Documents of a sequence cut into chunks of one size, for recurrences that work chunk by chunk.

Shapes: B sequences of S tokens, n chunks of C tokens, G groups of H heads.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def padded_documents(x_BS: Tensor, documents: tuple[int, ...], chunk_size: int) -> Tensor:
    """Each document up to whole chunks with zeros."""
    if all(length % chunk_size == 0 for length in documents):
        return x_BS
    pads = [(0, 0) * (x_BS.dim() - 2) + (0, -length % chunk_size) for length in documents]
    return torch.cat([F.pad(part, pad) for part, pad in zip(x_BS.split(documents, 1), pads, strict=True)], 1)


def cut_documents(x_BS: Tensor, documents: tuple[int, ...], chunk_size: int) -> Tensor:
    """Without what :func:`padded_documents` has added."""
    if all(length % chunk_size == 0 for length in documents):
        return x_BS
    parts = x_BS.split([length + -length % chunk_size for length in documents], 1)
    return torch.cat([part[:, :length] for part, length in zip(parts, documents, strict=True)], 1)


def chunks_of_heads(
    x_BSH: Tensor, documents: tuple[int, ...], chunk_size: int, num_groups: int, dtype: torch.dtype
) -> Tensor:
    """Chunks [B, n, G, H, C, ...] of all heads' tokens, in ``dtype``."""
    x_BnCH: Tensor = padded_documents(x_BSH.to(dtype), documents, chunk_size).unflatten(1, (-1, chunk_size))
    x_BnCGH: Tensor = x_BnCH.unflatten(3, (num_groups, -1))
    return x_BnCGH.movedim(2, 4)


def tokens_of_chunks(x_BnGHC: Tensor, documents: tuple[int, ...], chunk_size: int) -> Tensor:
    """The inverse of :func:`chunks_of_heads`: [B, S, heads, ...]."""
    return cut_documents(x_BnGHC.movedim(4, 2).flatten(3, 4).flatten(1, 2), documents, chunk_size)


def decays_between(so_far_C: Tensor) -> Tensor:
    """What is left at token i of what token j <= i added [..., i, j], nothing of later ones.

    ``so_far``: sums of log decays up to each token of a chunk.
    """
    size = so_far_C.shape[-1]
    later_CC = torch.ones(size, size, dtype=torch.bool, device=so_far_C.device).triu(1)
    # Before exp, which would overflow there.
    return (so_far_C[..., None] - so_far_C[..., None, :]).masked_fill(later_CC, -torch.inf).exp()
