"""Micro-batches under dynamic context parallelism: every rank works out the packs of a step, and reads its own.

All ranks see the same lengths, so nothing has to be sent (report section 6 has them broadcast over the pipeline).

Shapes: T tokens of the tp group, padding included.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.cp_schedule import PlacedPack, padded_length
from moeplan.executor.data import TokenSource
from moeplan.executor.mesh import Mesh
from moeplan.executor.micro_batch import NO_TARGET, MicroBatch, StepShape, by_depth, document_weights
from moeplan.executor.pack_layout import PackLayout
from moeplan.plan import Plan
from moeplan.step_packs import step_packs

# Ids of a document by its place among those of the step and its length: one more than its tokens.
ReadDocument = Callable[[int, int], Tensor]
_NOTHING = torch.zeros(1, dtype=torch.int64)  # of an idle rank


class PackBatches:
    """The packs of this rank."""

    def __init__(self, plan: Plan, mesh: Mesh, device: torch.device) -> None:
        self.plan, self.mesh, self.device = plan, mesh, device
        self._packs = step_packs(plan, plan.document_lengths)

    def shape(self) -> StepShape:
        """How many micro-batches a step has, and tokens of each on this rank."""
        num_tokens = tuple(self._layout(index).num_tokens // self.mesh.tp.size for index in range(len(self._packs)))
        return StepShape(num_tokens, document_weights(self.plan, self.plan.document_lengths))

    def micro_batch(self, tokens: TokenSource, step: int, index: int) -> MicroBatch:
        """Ids of this rank's pack in micro-batch ``index``."""
        return self._read(index, lambda document, length: tokens.document(step, document, length))

    def validation_micro_batch(self, tokens: TokenSource, index: int, batch: int, num_batches: int) -> MicroBatch:
        """As :meth:`micro_batch`, of held-out ids of batch ``batch`` of as many, the same at every step."""
        num = len(self.plan.document_lengths)

        def read(document: int, length: int) -> Tensor:
            return tokens.validation_document(batch * num + document, length, num_batches * num)

        return self._read(index, read)

    def _documents(self, index: int) -> tuple[int, tuple[int, ...]]:
        """How many ranks share this rank's pack, and its documents; an idle rank has a group of its own and none."""
        rank = self.mesh.dp_cp.index
        own = (one for one in self._packs[index] if one.first_rank <= rank < one.first_rank + one.num_ranks)
        return next(((one.num_ranks, one.documents) for one in own), (1, ()))

    def _layout(self, index: int) -> PackLayout:
        """An idle rank takes part with padding alone: others wait for it at every exchange of tokens."""
        size, documents = self._documents(index)
        layout = PackLayout(
            tuple(self.plan.document_lengths[document] for document in documents) or (0,),
            self.mesh.cp_blocks[size],
            self.mesh.tp,
            self.mesh.tp_cp_blocks[size],
            self.plan.tokens_per_step,
            self.device,
        )
        fullest = max(map(self._num_tokens, self._packs[index]))
        return replace(layout, num_missing=(fullest - layout.num_tokens) // self.mesh.tp.size)

    def _num_tokens(self, pack: PlacedPack) -> int:
        """Tokens of each tp group that shares a pack."""
        lengths = (self.plan.document_lengths[document] for document in pack.documents)
        return sum(padded_length(length, pack.num_ranks, self.plan.tp) for length in lengths) // pack.num_ranks

    def _read(self, index: int, read: ReadDocument) -> MicroBatch:
        layout, documents = self._layout(index), self._documents(index)[1]
        ids = [read(*one) for one in zip(documents, layout.lengths, strict=False)] or [_NOTHING]
        ids_DT = torch.cat(list(map(self._depths, ids, layout.documents)), 1)
        own_DT = moved(ids_DT, self.device)[:, layout.places_T]
        tokens, targets = own_DT.chunk(2)
        return MicroBatch(tuple(tokens), tuple(targets), layout)

    def _depths(self, ids: Tensor, padded: int) -> Tensor:
        """What each prediction depth reads, and below it what each predicts, of one document."""
        read, predicted = by_depth(ids[None, :-1], ids[None, 1:], self.plan.model.num_mtp_layers)
        return torch.cat([_padded(torch.cat(read), padded, 0), _padded(torch.cat(predicted), padded, NO_TARGET)])


def _padded(ids_DL: Tensor, length: int, fill: int) -> Tensor:
    return F.pad(ids_DL, (0, length - ids_DL.shape[1]), value=fill)


def moved(ids: Tensor, device: torch.device) -> Tensor:
    """Token ids on the device. Pinned, or the host would wait there for the micro-batch before."""
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids
