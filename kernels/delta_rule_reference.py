"""The gated delta rule token by token, in plain autograd: any device and dtype. Shapes as in delta_rule.py."""

from typing import NamedTuple

import torch
from torch import Tensor

NORM_EPS = 1e-6  # of the squared length of a query or key


class DeltaTokens(NamedTuple):
    """Queries, keys and values of tokens, the log of what each leaves of the state, and how far each corrects it.

    Key head i serves the V / K value heads from i V / K on.
    """

    query: Tensor  # [B, S, K, D]
    key: Tensor  # [B, S, K, D]
    value: Tensor  # [B, S, V, E]
    log_decay: Tensor  # [B, S, V]
    beta: Tensor  # [B, S, V]


def unit(x_D: Tensor) -> Tensor:
    """Vectors divided by their length."""
    return x_D * torch.rsqrt(x_D.square().sum(-1, keepdim=True) + NORM_EPS)


def gated_delta_rule(tokens: DeltaTokens, documents: tuple[int, ...], chunk_size: int = 1) -> Tensor:
    """See :func:`moeplan.kernels.delta_rule.gated_delta_rule`; a chunk here is a token, whatever ``chunk_size``."""
    del chunk_size
    dtype, batch = torch.promote_types(tokens.value.dtype, torch.float32), len(tokens.value)
    q_BSKD, k_BSKD, v_BSVE, log_decay_BSV, beta_BSV = (x.to(dtype) for x in tokens)
    share, width = v_BSVE.shape[2] // k_BSKD.shape[2], k_BSKD.shape[3]
    q_BSVD, k_BSVD = (unit(x).repeat_interleave(share, 2) for x in (q_BSKD, k_BSKD))
    outs = []
    first = 0
    for length in documents:
        state_BVDE = v_BSVE.new_zeros((batch, v_BSVE.shape[2], width, v_BSVE.shape[3]))
        for i in range(first, first + length):
            state_BVDE = state_BVDE * log_decay_BSV[:, i].exp()[..., None, None]
            error_BVE = v_BSVE[:, i] - torch.einsum("bvd,bvde->bve", k_BSVD[:, i], state_BVDE)
            state_BVDE = state_BVDE + torch.einsum("bvd,bve,bv->bvde", k_BSVD[:, i], error_BVE, beta_BSV[:, i])
            outs.append(torch.einsum("bvd,bvde->bve", q_BSVD[:, i], state_BVDE) * width**-0.5)
        first += length
    return torch.stack(outs, 1).to(tokens.value.dtype)
