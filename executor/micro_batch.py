"""The token ids of one micro-batch as one rank needs them: what it reads, and what it should predict.

Shapes: B sequences of S ids, T = B * S / cp ids of this rank's tp group (its chunks of each sequence, one after the
other).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moeplan.executor.context import own_positions
from moeplan.executor.mesh import Group
from moeplan.plan import Plan

# A target that nothing predicts: beyond the end of the sequence.
NO_TARGET = -1


@dataclass(frozen=True)
class MicroBatch:
    """``tokens[d]`` and ``targets[d]``, each [T], of prediction depth d: 0 is the model, d > 0 its MTP layer d.

    Depth d reads the id d places on and predicts the one after it; targets beyond the sequence are ``NO_TARGET``.
    """

    tokens: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


def cut_micro_batch(inputs: Tensor, targets: Tensor, plan: Plan, cp: Group) -> MicroBatch:
    """The rank's part of ``inputs`` and ``targets`` [B * S], the second one place further on than the first."""
    inputs_BS, targets_BS = inputs.view(-1, plan.seq_len), targets.view(-1, plan.seq_len)
    positions = own_positions(plan.documents, cp, inputs.device) if cp.size > 1 else None

    def own(ids_BS: Tensor) -> Tensor:
        return (ids_BS if positions is None else ids_BS[:, positions]).flatten()

    depths = range(1, plan.model.num_mtp_layers + 1)
    read = [inputs_BS, *(_shifted(targets_BS, depth - 1, 0) for depth in depths)]
    predicted = [targets_BS, *(_shifted(targets_BS, depth, NO_TARGET) for depth in depths)]
    return MicroBatch(tuple(map(own, read)), tuple(map(own, predicted)))


def _shifted(ids_BS: Tensor, places: int, fill: int) -> Tensor:
    """Ids ``places`` further on, ``fill`` where there are none."""
    if places == 0:
        return ids_BS
    return torch.cat([ids_BS[:, places:], ids_BS.new_full((ids_BS.shape[0], places), fill)], 1)


def loss_weights(plan: Plan) -> tuple[float, ...]:
    """What the summed loss of each prediction depth is multiplied by in the loss of a step.

    The model's is a mean over all tokens; MTP's are means over the tokens that have a target, scaled by
    ``mtp_loss_scaling_factor`` over the number of MTP layers (DeepSeek-V3; report section 8).
    """
    model, depths = plan.model, plan.model.num_mtp_layers
    mtp = (
        model.mtp_loss_scaling_factor / depths / (plan.global_batch_size * (plan.seq_len - depth))
        for depth in range(1, depths + 1)
    )
    return (1 / plan.tokens_per_step, *mtp)
