"""Cross entropy's passes in plain torch, a block of tokens at a time, so that no second copy of all logits exists.

Shapes: T tokens, V vocabulary entries of this rank.
"""

import torch
from torch import Tensor

from moeplan.kernels.logit_stats import LogitStats

_BLOCK_ELEMENTS = 2**21  # 8 MiB of fp32: stays in the cache of one core, and hides the cost of a call


def logit_stats(logits_TV: Tensor, target_T: Tensor) -> LogitStats:
    """See :func:`moeplan.kernels.cross_entropy.logit_stats`."""
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    highest_T = logits_TV.amax(1).to(dtype)
    sums = [
        (block.to(dtype) - highest[:, None]).exp_().sum(1)
        for block, highest in zip(_blocks(logits_TV), _blocks(highest_T, logits_TV.shape[1]), strict=True)
    ]
    chosen_T = logits_TV.gather(1, target_T.clamp(min=0)[:, None])[:, 0].to(dtype)
    return LogitStats(highest_T, torch.cat(sums), torch.where(target_T >= 0, chosen_T, 0))


def logit_gradient_(logits_TV: Tensor, log_sum_T: Tensor, grad_T: Tensor, target_T: Tensor) -> Tensor:
    """See :func:`moeplan.kernels.cross_entropy.logit_gradient_`."""
    width = logits_TV.shape[1]
    tokens = (_blocks(one, width) for one in (log_sum_T, grad_T, target_T))
    for block, log_sum, grad, target in zip(_blocks(logits_TV), *tokens, strict=True):
        probs = (block.to(log_sum.dtype) - log_sum[:, None]).exp_()
        is_here = (target >= 0).to(probs.dtype)[:, None]
        probs.scatter_add_(1, target.clamp(min=0)[:, None], -is_here)
        block.copy_(probs.mul_(grad[:, None]))
    return logits_TV


def _blocks(x: Tensor, width: int | None = None) -> tuple[Tensor, ...]:
    """Consecutive tokens, as many as rows of ``width`` (that of x) make a block."""
    rows = max(1, _BLOCK_ELEMENTS // (width or x.shape[1]))
    blocks: tuple[Tensor, ...] = x.split(rows)
    return blocks
