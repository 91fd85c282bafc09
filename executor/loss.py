"""Head and cross entropy over logits split by vocabulary, in one differentiable step.

Shapes: T tokens of the tp group, L = T / tp tokens of this rank, H hidden, V rows of the head on this rank.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moeplan.executor.collectives import all_gather_raw, all_reduce, reduce_scatter_raw
from moeplan.executor.dtypes import at_least_fp32
from moeplan.executor.mesh import Group
from moeplan.executor.scopes import scope


class _HeadLoss(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, hidden_LH: Tensor, weight_VH: Tensor, targets_T: Tensor, first_token: int, group: Group
    ) -> Tensor:
        with scope("tp_comm"):
            hidden_TH = all_gather_raw(hidden_LH, group)
        with scope("loss"):
            logits_TV = (hidden_TH @ weight_VH.t()).to(at_least_fp32(hidden_LH.dtype))
            highest_T = logits_TV.amax(1)
            if group.size > 1:
                dist.all_reduce(highest_T, dist.ReduceOp.MAX, group=group.process_group)
            logits_TV.sub_(highest_T[:, None])
            local_T = targets_T - first_token
            is_here_T = (local_T >= 0) & (local_T < weight_VH.shape[0])
            local_T = torch.where(is_here_T, local_T, 0)
            target_logit_T = logits_TV.gather(1, local_T[:, None])[:, 0] * is_here_T
            probs_TV = logits_TV.exp_()
            sums_2T = all_reduce(torch.stack([probs_TV.sum(1), target_logit_T]), group)
            probs_TV.div_(sums_2T[0, :, None])
        ctx.group = group
        ctx.save_for_backward(hidden_LH, weight_VH, probs_TV, local_T, is_here_T)
        return sums_2T[0].log() - sums_2T[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_LH, weight_VH, probs_TV, local_T, is_here_T = ctx.saved_tensors
        with scope("tp_comm"):
            hidden_TH = all_gather_raw(hidden_LH, ctx.group)
        with scope("loss"):
            is_target_T1 = is_here_T[:, None].to(probs_TV.dtype)
            grad_TV = probs_TV.scatter_add(1, local_T[:, None], -is_target_T1)
            grad_TV = grad_TV.mul_(grads[0][:, None]).to(hidden_LH.dtype)
            grad_VH = grad_TV.t() @ hidden_TH
            partial_TH = grad_TV @ weight_VH
        with scope("tp_comm"):
            return reduce_scatter_raw(partial_TH, ctx.group), grad_VH, None, None, None


def head_loss(hidden_LH: Tensor, weight_VH: Tensor, targets_T: Tensor, first_token: int, group: Group) -> Tensor:
    """Cross entropy loss_T of every token of the group, the same on each of its ranks.

    ``weight_VH`` are this rank's rows of the head, from token id ``first_token`` on. Softmax in fp32 at least.
    """
    loss_T = _HeadLoss.apply(hidden_LH, weight_VH, targets_T, first_token, group)
    return cast("Tensor", loss_T)
