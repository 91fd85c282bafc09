"""The recurrence of Mamba-2 token by token, in plain autograd: any device and dtype. Shapes as in ssd.py."""

from typing import NamedTuple

import torch
from torch import Tensor


class SsdTokens(NamedTuple):
    """What tokens bring to the state and read from it (the papers' x, dt, B and C).

    Group i of keys and queries serves the H / G heads from i H / G on. Steps are positive.
    """

    value: Tensor  # [B, S, H, P]
    time_step: Tensor  # [B, S, H]
    key: Tensor  # [B, S, G, N]
    query: Tensor  # [B, S, G, N]


class SsdHeads(NamedTuple):
    """Of each head the rate (below 0) at which its state decays, and how much of the value it lets through."""

    rate: Tensor  # [H]
    skip: Tensor  # [H]


def ssd(tokens: SsdTokens, heads: SsdHeads, documents: tuple[int, ...], chunk_size: int = 1) -> Tensor:
    """See :func:`moeplan.kernels.ssd.ssd`; a chunk here is a token, whatever ``chunk_size``."""
    del chunk_size
    dtype, batch = torch.promote_types(tokens.value.dtype, torch.float32), len(tokens.value)
    x_BSHP, step_BSH, k_BSGN, q_BSGN = (one.to(dtype) for one in tokens)
    rate_H, skip_H = (one.to(dtype) for one in heads)
    share = x_BSHP.shape[2] // k_BSGN.shape[2]
    k_BSHN, q_BSHN = (one.repeat_interleave(share, 2) for one in (k_BSGN, q_BSGN))
    outs = []
    first = 0
    for length in documents:
        state_BHNP = x_BSHP.new_zeros((batch, x_BSHP.shape[2], k_BSHN.shape[3], x_BSHP.shape[3]))
        for i in range(first, first + length):
            step_BH = step_BSH[:, i]
            added_BHNP = torch.einsum("bhn,bhp,bh->bhnp", k_BSHN[:, i], x_BSHP[:, i], step_BH)
            state_BHNP = state_BHNP * (rate_H * step_BH).exp()[..., None, None] + added_BHNP
            outs.append(torch.einsum("bhn,bhnp->bhp", q_BSHN[:, i], state_BHNP) + skip_H[:, None] * x_BSHP[:, i])
        first += length
    return torch.stack(outs, 1).to(tokens.value.dtype)
