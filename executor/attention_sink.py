"""Attention sinks: a learned score per head that takes its part of every softmax and brings no value (GPT-OSS).

A sink is one more key before all others, zero but for one more channel, in which queries carry the head's score: so
any kernel for attention computes it. Shapes: B sequences, Q queries, K keys, N heads and M key-value heads, D width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

# Kernels on a GPU want heads of a multiple of this many channels; the first of those added holds the score.
_ADDED_CHANNELS = 8


def with_sink_key(
    q_BQND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, sinks_N: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose attention at ``scale`` has the sinks, as key 0."""
    batch, num_queries, num_heads, _ = q_BQND.shape
    score_N = (sinks_N / scale).to(q_BQND.dtype)
    score_BQN1 = score_N[:, None].expand(batch, num_queries, num_heads, 1)
    q_BQNC = F.pad(torch.cat([q_BQND, score_BQN1], 3), (0, _ADDED_CHANNELS - 1))
    one_C = k_BKMD.new_zeros(q_BQNC.shape[3])
    one_C[k_BKMD.shape[3]] = 1
    sink_B1MC = one_C.expand(batch, 1, k_BKMD.shape[2], -1)
    k_BKMC = torch.cat([sink_B1MC, F.pad(k_BKMD, (0, _ADDED_CHANNELS))], 1)
    return q_BQNC, k_BKMC, F.pad(v_BKMD, (0, 0, 0, 0, 1, 0))
