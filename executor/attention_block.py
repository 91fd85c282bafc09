"""Attention of some queries to some keys that can be merged with others: its output, log-sum-exp and gradients.

Half precision on a GPU takes torch's flash kernels; everything else multiplies the scores out, in fp32 at least.

Shapes: B sequences, Q queries, K keys, N heads and M key-value heads (N a multiple of M), D width of a head.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.executor.dtypes import at_least_fp32

Gradients = tuple[Tensor, Tensor, Tensor]


def block_forward(
    q_BNQD: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, mask_QK: Tensor | None = None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention to these keys alone, and the log [B, N, Q] of its denominators. ``causal``: query i sees keys to i.

    ``mask_QK`` (true: seen) narrows that where no flash kernel runs.
    """
    k_BNKD, v_BNKD = (_for_all_heads(x, q_BNQD.shape[1]) for x in (k_BMKD, v_BMKD))
    if not _has_flash(q_BNQD):
        q_BNQD, k_BNKD, v_BNKD = (x.to(at_least_fp32(x.dtype)) for x in (q_BNQD, k_BNKD, v_BNKD))
        scores_BNQK = _scores(q_BNQD, k_BNKD, _hidden(q_BNQD, k_BNKD, mask_QK, causal=causal))
        lse_BNQ = scores_BNQK.logsumexp(-1)
        return (scores_BNQK - lse_BNQ[..., None]).exp() @ v_BNKD, lse_BNQ
    assert mask_QK is None
    width, scale = v_BNKD.shape[3], q_BNQD.shape[3] ** -0.5
    padded = (_padded(x, q_BNQD.shape[3]) for x in (q_BNQD, k_BNKD, v_BNKD))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(*padded, 0.0, causal, False, scale=scale)[:2]  # noqa: SLF001 - torch's only door to the log-sum-exp
    return out[..., :width], lse[..., : q_BNQD.shape[2]]


def block_backward(
    grad_BNQD: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out_BNQD: Tensor,
    lse_BNQ: Tensor,
    mask_QK: Tensor | None = None,
    *,
    causal: bool,
) -> Gradients:
    """This block's part of the gradients of queries, keys and values (``inputs``).

    ``out_BNQD`` and ``lse_BNQ`` are those over all keys, of this block and of all the others.
    """
    q_BNQD, k_BMKD, v_BMKD = inputs
    num_kv_heads = k_BMKD.shape[1]
    k_BNKD, v_BNKD = (_for_all_heads(x, q_BNQD.shape[1]) for x in (k_BMKD, v_BMKD))
    whole = (q_BNQD, k_BNKD, v_BNKD)
    if _has_flash(q_BNQD):
        grad_q, grad_k, grad_v = _flash_backward(grad_BNQD, whole, out_BNQD, lse_BNQ, causal=causal)
    else:
        hidden = _hidden(q_BNQD, k_BNKD, mask_QK, causal=causal)
        grad_q, grad_k, grad_v = _plain_backward(grad_BNQD, whole, out_BNQD, lse_BNQ, hidden)
    return grad_q, _of_shared_heads(grad_k, num_kv_heads), _of_shared_heads(grad_v, num_kv_heads)


def _plain_backward(
    grad_BNQD: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out_BNQD: Tensor,
    lse_BNQ: Tensor,
    hidden_QK: Tensor | None,
) -> Gradients:
    grad_BNQD, q_BNQD, k_BNKD, v_BNKD = (x.to(lse_BNQ.dtype) for x in (grad_BNQD, *inputs))
    probs_BNQK = (_scores(q_BNQD, k_BNKD, hidden_QK) - lse_BNQ[..., None]).exp()
    rest_BNQ1 = (grad_BNQD * out_BNQD).sum(-1, keepdim=True)
    grad_scores = probs_BNQK * (grad_BNQD @ v_BNKD.transpose(2, 3) - rest_BNQ1) / math.sqrt(q_BNQD.shape[3])
    return grad_scores @ k_BNKD, grad_scores.transpose(2, 3) @ q_BNQD, probs_BNQK.transpose(2, 3) @ grad_BNQD


def _flash_backward(
    grad_BNQD: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out_BNQD: Tensor, lse_BNQ: Tensor, *, causal: bool
) -> Gradients:
    width, v_width = inputs[0].shape[3], inputs[2].shape[3]
    grad, q, k, v, out = (_padded(x, width).contiguous() for x in (grad_BNQD, *inputs, out_BNQD))
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(  # noqa: SLF001 - as above
        grad, q, k, v, out, lse_BNQ.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
        no_dropout, no_dropout, scale=width**-0.5,
    )  # fmt: skip
    return grad_q[..., :width], grad_k[..., :width], grad_v[..., :v_width]


def _has_flash(q_BNQD: Tensor) -> bool:
    return q_BNQD.is_cuda and q_BNQD.dtype in (torch.bfloat16, torch.float16)


def _hidden(q_BNQD: Tensor, k_BNKD: Tensor, mask_QK: Tensor | None, *, causal: bool) -> Tensor | None:
    """Which keys each query does not see [Q, K]; None where it sees all."""
    if mask_QK is not None:
        return ~mask_QK
    shape = (q_BNQD.shape[2], k_BNKD.shape[2])
    return torch.ones(shape, dtype=torch.bool, device=q_BNQD.device).triu(1) if causal else None


def _scores(q_BNQD: Tensor, k_BNKD: Tensor, hidden_QK: Tensor | None) -> Tensor:
    scores_BNQK = q_BNQD @ k_BNKD.transpose(2, 3) / math.sqrt(q_BNQD.shape[3])
    return scores_BNQK if hidden_QK is None else scores_BNQK.masked_fill(hidden_QK, -torch.inf)


def _padded(x: Tensor, width: int) -> Tensor:
    """Zeros up to ``width`` and on to a multiple of 8, as flash kernels want heads of one such width."""
    return F.pad(x, (0, -(-width // 8) * 8 - x.shape[3]))


def _for_all_heads(x_BMKD: Tensor, num_heads: int) -> Tensor:
    return x_BMKD if x_BMKD.shape[1] == num_heads else x_BMKD.repeat_interleave(num_heads // x_BMKD.shape[1], 1)


def _of_shared_heads(grad_BNKD: Tensor, num_kv_heads: int) -> Tensor:
    """Gradients of heads that share keys and values, summed."""
    return grad_BNKD if grad_BNKD.shape[1] == num_kv_heads else grad_BNKD.unflatten(1, (num_kv_heads, -1)).sum(2)
