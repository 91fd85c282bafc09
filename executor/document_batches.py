"""Micro-batches of sequences whose documents are kept apart: Megatron's reset_attention_mask and reset_position_ids.

Documents lie as they do in the data, so sequences, steps and what experts see of them are those of a run without this.
The last token of a document predicts nothing, where Megatron's eod_mask_loss leaves out what follows an end token.

Shapes: B sequences of S tokens.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from moeplan.executor.mesh import Mesh
from moeplan.executor.micro_batch import NO_TARGET, MicroBatch, by_depth, document_weights
from moeplan.executor.pack_layout import PackLayout
from moeplan.plan import Plan

# After how many of the S + 1 ids of a sequence documents end.
Ends = tuple[int, ...]


def lengths_of(ends: Ends, seq_len: int) -> list[int]:
    """Tokens of each document of a sequence, the first and the last of which may go on outside it."""
    bounds = [0, *(end for end in ends if end < seq_len), seq_len]
    return [end - start for start, end in pairwise(bounds)]


class DocumentBatches:
    """Those of one rank."""

    def __init__(self, plan: Plan, mesh: Mesh, device: torch.device) -> None:
        self.plan, self.mesh, self.device = plan, mesh, device

    def loss_weights(self, ends_of_sequences: Iterable[Ends]) -> tuple[int, tuple[float, ...]]:
        """Targets of a global batch of these sequences, and what makes the loss of each depth a mean over its own."""
        seq_len = self.plan.seq_len
        lengths = [
            length - (index < len(ends))
            for ends in ends_of_sequences
            for index, length in enumerate(lengths_of(ends, seq_len))
        ]
        num_targets = max(1, sum(lengths))
        return num_targets, document_weights(self.plan, lengths if sum(lengths) else [1])

    def cut(self, inputs: Tensor, targets: Tensor, ends_of_sequences: Sequence[Ends]) -> MicroBatch:
        """Of ``inputs`` and ``targets`` [B * S], the second one place further on than the first."""
        seq_len = self.plan.seq_len
        last = [number * seq_len + end - 1 for number, ends in enumerate(ends_of_sequences) for end in ends]
        targets = targets.index_fill(0, torch.tensor(last, dtype=torch.int64, device=targets.device), NO_TARGET)
        lengths = [length for ends in ends_of_sequences for length in lengths_of(ends, seq_len)]
        parts = [
            by_depth(read[None], predicted[None], self.plan.model.num_mtp_layers)
            for read, predicted in zip(inputs.split(lengths), targets.split(lengths), strict=True)
        ]
        read, predicted = (zip(*one, strict=True) for one in zip(*parts, strict=True))
        tokens = tuple(torch.cat(one, 1)[0].clamp(min=0) for one in read)  # an MTP depth reads on beyond a document
        mesh, num_step_tokens = self.mesh, self.plan.tokens_per_step
        layout = PackLayout(tuple(lengths), mesh.cp, mesh.tp, mesh.tp_cp, num_step_tokens, self.device, is_pack=False)
        return MicroBatch(tokens, tuple(torch.cat(one, 1)[0] for one in predicted), layout)
