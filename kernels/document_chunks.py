"""Documents of a sequence cut into chunks of one size, for recurrences that work chunk by chunk.

Shapes: B sequences of S tokens.
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
