"""Adam by torch's fused kernel.

Shapes: N elements.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from moeplan.kernels.adam import AdamOptions, AdamState


def adam_(state: "AdamState", options: "AdamOptions") -> None:
    """See :func:`moeplan.kernels.adam.adam_`. Moments of another type are brought to that of ``main_N`` and back.

    torch.optim has the same step, but takes 145 MiB of imports along.
    """
    if options.grad_scale != 1:
        state.grad_N.mul_(options.grad_scale)
    dtype = state.main_N.dtype
    moments = [moment.to(dtype) for moment in (state.first_N, state.second_N)]
    torch.ops.aten._fused_adamw_(
        [state.main_N],
        [state.grad_N.to(dtype)],
        [moments[0]],
        [moments[1]],
        [],
        [state.num_steps],
        lr=options.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=False,
    )
    for kept, moment in zip((state.first_N, state.second_N), moments, strict=True):
        if kept is not moment:
            kept.copy_(moment)
    if state.weight_N is not None:
        state.weight_N.copy_(state.main_N)
