"""Head and cross entropy over logits split by vocabulary, in one differentiable step.

Shapes: T tokens of the tp group, L = T / tp tokens of this rank, H hidden, V rows of the head on this rank.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moeplan.executor.collectives import all_gather_raw, all_reduce, reduce_scatter_raw
from moeplan.executor.mesh import Group
from moeplan.executor.scopes import scope
from moeplan.kernels.cross_entropy import logit_gradient_, logit_stats
from moeplan.kernels.main_grad import main_grad_of
from moeplan.kernels.weight_grad import add_weight_grad_


class _HeadLoss(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, hidden_LH: Tensor, weight_VH: Tensor, targets_T: Tensor, first_token: int, group: Group
    ) -> Tensor:
        with scope("tp_comm"):
            hidden_TH = all_gather_raw(hidden_LH, group)
        with scope("loss"):
            logits_TV = hidden_TH @ weight_VH.t()
            local_T = targets_T - first_token
            local_T = torch.where((local_T >= 0) & (local_T < weight_VH.shape[0]), local_T, -1)
            highest_T, sum_T, target_logit_T = logit_stats(logits_TV, local_T)
            if group.size > 1:
                own_highest_T = highest_T.clone()
                dist.all_reduce(highest_T, dist.ReduceOp.MAX, group=group.process_group)
                sum_T = sum_T * (own_highest_T - highest_T).exp()
                sum_T, target_logit_T = all_reduce(torch.stack([sum_T, target_logit_T]), group)
            log_sum_T = highest_T + sum_T.log()
        ctx.group, ctx.main_grad = group, main_grad_of(weight_VH)
        ctx.logits_TV = logits_TV  # not saved as a tensor: backward turns it into its gradient
        ctx.save_for_backward(hidden_LH, weight_VH, log_sum_T, local_T)
        return log_sum_T - target_logit_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_LH, weight_VH, log_sum_T, local_T = ctx.saved_tensors
        logits_TV, ctx.logits_TV = ctx.logits_TV, None
        if logits_TV is None:
            raise RuntimeError("the logits became their gradient in the first backward; there can be no second")
        with scope("tp_comm"):
            hidden_TH = all_gather_raw(hidden_LH, ctx.group)
        with scope("loss"):
            grad_TV = logit_gradient_(logits_TV, log_sum_T, grads[0], local_T)
            del logits_TV
            grad_VH = None
            if ctx.main_grad is None:
                grad_VH = grad_TV.t() @ hidden_TH
            else:
                add_weight_grad_(ctx.main_grad, grad_TV, hidden_TH)
            partial_TH = grad_TV @ weight_VH
        with scope("tp_comm"):
            return reduce_scatter_raw(partial_TH, ctx.group), grad_VH, None, None, None


def head_loss(hidden_LH: Tensor, weight_VH: Tensor, targets_T: Tensor, first_token: int, group: Group) -> Tensor:
    """Cross entropy loss_T of every token of the group, the same on each of its ranks.

    ``weight_VH`` are this rank's rows of the head, from token id ``first_token`` on. Softmax in fp32 at least. Logits
    are kept in the dtype of the GEMM and overwritten by their gradient: one copy of them at any time.
    """
    loss_T = _HeadLoss.apply(hidden_LH, weight_VH, targets_T, first_token, group)
    return cast("Tensor", loss_T)
