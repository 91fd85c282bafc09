"""The token ids of one micro-batch as one rank needs them: what it reads, and what it should predict.

Shapes: B sequences of S ids, T = B * S / cp ids of this rank's tp group (its chunks of each sequence, one after the
other).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeplan.executor.context import own_positions
from moeplan.executor.mesh import Group
from moeplan.executor.pack_layout import PackLayout
from moeplan.plan import Plan

# A target that nothing predicts: beyond the end of the sequence.
NO_TARGET = -1


@dataclass(frozen=True)
class MicroBatch:
    """``tokens[d]`` and ``targets[d]``, each [T], of prediction depth d: 0 is the model, d > 0 its MTP layer d.

    Depth d reads the id d places on and predicts the one after it; targets beyond the sequence are ``NO_TARGET``.
    ``layout``: where the tokens lie under dynamic context parallelism; None: as the plan has it.
    """

    tokens: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    layout: PackLayout | None = None


@dataclass(frozen=True)
class StepShape:
    """Of one step: tokens of each micro-batch on this rank, and what the summed loss of each depth is multiplied by."""

    num_tokens: tuple[int, ...]
    loss_weights: tuple[float, ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.num_tokens)


def plan_shape(plan: Plan) -> StepShape:
    """That of every step of a plan whose micro-batches are all alike."""
    return StepShape((plan.tokens_per_rank,) * plan.num_micro_batches, loss_weights(plan))


def cut_micro_batch(inputs: Tensor, targets: Tensor, plan: Plan, cp: Group) -> MicroBatch:
    """The rank's part of ``inputs`` and ``targets`` [B * S], the second one place further on than the first."""
    inputs_BS, targets_BS = inputs.view(-1, plan.seq_len), targets.view(-1, plan.seq_len)
    positions = own_positions(plan.documents, cp, inputs.device) if cp.size > 1 else None

    def own(ids_BS: Tensor) -> Tensor:
        return (ids_BS if positions is None else ids_BS[:, positions]).flatten()

    read, predicted = by_depth(inputs_BS, targets_BS, plan.model.num_mtp_layers)
    return MicroBatch(tuple(map(own, read)), tuple(map(own, predicted)))


def by_depth(inputs_BS: Tensor, targets_BS: Tensor, num_mtp_layers: int) -> tuple[list[Tensor], list[Tensor]]:
    """Ids [B, S] that each prediction depth reads, and those that it predicts."""
    depths = range(1, num_mtp_layers + 1)
    read = [inputs_BS, *(_shifted(targets_BS, depth - 1, 0) for depth in depths)]
    predicted = [targets_BS, *(_shifted(targets_BS, depth, NO_TARGET) for depth in depths)]
    return read, predicted


def _shifted(ids_BS: Tensor, places: int, fill: int) -> Tensor:
    """Ids ``places`` further on, ``fill`` where there are none."""
    if places == 0:
        return ids_BS
    num_kept = max(0, ids_BS.shape[1] - places)
    return torch.cat([ids_BS[:, places:], ids_BS.new_full((ids_BS.shape[0], ids_BS.shape[1] - num_kept), fill)], 1)


def loss_weights(plan: Plan) -> tuple[float, ...]:
    """What the summed loss of each prediction depth is multiplied by in the loss of a step.

    The model's is a mean over all tokens; MTP's are means over the tokens that have a target, scaled by
    ``mtp_loss_scaling_factor`` over the number of MTP layers (DeepSeek-V3; report section 8).
    """
    return document_weights(plan, (plan.seq_len,) * plan.global_batch_size)


def document_weights(plan: Plan, lengths: Sequence[int]) -> tuple[float, ...]:
    """:func:`loss_weights` of a step with documents of these lengths, each with targets of its own."""
    model, depths = plan.model, plan.model.num_mtp_layers
    mtp = (
        model.mtp_loss_scaling_factor / depths / max(1, sum(max(0, length - depth) for length in lengths))
        for depth in range(1, depths + 1)
    )
    return (1 / sum(lengths), *mtp)
