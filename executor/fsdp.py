"""Full sharding (FSDP): weights and main gradients of a unit are split, and whole only while its layer runs.

Parameters stay views of one buffer whose storage comes and goes, so that autograd can keep them for backward. Weights
are gathered before a layer's forward and before its backward and go after each; a backward's gradients are
reduce-scattered and added to this rank's part of the main gradients, micro-batch by micro-batch (report section 1.7).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moeplan.executor.collectives import all_reduce, start_all_gather, start_reduce_scatter
from moeplan.executor.copies import Copies
from moeplan.executor.dtypes import Dtypes
from moeplan.executor.flat_buffer import FlatBuffer
from moeplan.executor.parameters import Entry
from moeplan.executor.scopes import scope


class ShardedBuffer(FlatBuffer):
    """A flat buffer of which this rank keeps ``part_weights`` and ``part_grads``. The shard group has several ranks."""

    def __init__(self, entries: Sequence[Entry], dtypes: Dtypes, copies: Copies) -> None:
        super().__init__(entries, dtypes, copies, is_sharded=True)
        self.part_weights = self.own.inside(self.weights).clone()
        self.part_grads = torch.zeros_like(self.own.inside(self.grads))
        self.is_whole, self.has_grads, self.num_users = True, True, 1
        self.release()
        self._free_grads()

    @property
    def updated_weights(self) -> Tensor:
        """This rank's part."""
        return self.part_weights

    @property
    def resident_weights(self) -> Tensor:
        """This rank's part."""
        return self.part_weights

    @property
    def resident_grads(self) -> Tensor:
        """This rank's part."""
        return self.part_grads

    def start_gather(self) -> None:
        """Weights are gathered when they are needed."""

    def prefetch(self) -> None:
        """Begin to make the weights whole."""
        if self.is_whole:
            return
        _resize(self.weights, self.weights.numel())
        with scope("dp_comm"):
            self._gathering = start_all_gather(self.weights, self.part_weights, self.copies.shard)
        self.is_whole = True

    def gather(self) -> None:
        """Make the weights whole for one user more."""
        self.num_users += 1
        self.prefetch()
        self.finish_gather()

    def release(self) -> None:
        """A user is done; after the last one this rank keeps its part of the weights alone."""
        self.num_users -= 1
        if self.is_whole and self.num_users == 0:
            self.finish_gather()
            _resize(self.weights, 0)
            self.is_whole = False

    def open_grads(self) -> None:
        """Make room for the gradients of one micro-batch."""
        self.finish_micro_batch()
        if not self.has_grads:
            _resize(self.grads, self.grads.numel())
            for gap in self.gaps:
                gap.inside(self.grads).zero_()
            for main in self.main_grads:
                main.clear_()
            self.has_grads = True

    def start_reduce(self) -> None:
        """Begin to sum the gradients of one micro-batch over the copies."""
        if not self.has_grads or self._reducing is not None:
            return
        for main in self.main_grads:
            main.finish_()
        with scope("dp_comm"):
            part = torch.empty_like(self.part_grads)
            self._reducing = start_reduce_scatter(part, self.grads, self.copies.shard)

    def finish_micro_batch(self) -> None:
        """Add the sum that was begun to this rank's main gradients, and free the whole ones."""
        if self._reducing is None:
            return
        with scope("dp_comm"):
            self.part_grads.add_(self._reducing.finish())
        self._reducing = None
        self._free_grads()

    def reduced_grads(self) -> Tensor:
        """This rank's part of the gradients of all micro-batches, summed over everything that has a part of them."""
        self.start_reduce()
        self.finish_micro_batch()
        with scope("dp_comm"):
            all_reduce(self.part_grads, self.copies.replica)
        self._sum_parts(self.part_grads)
        return self.part_grads

    def clear_grads(self) -> None:
        """Begin a step."""
        self.part_grads.zero_()

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of the reduced gradients, by the whole tensor they lie in."""
        yield from self._named(self.part_grads)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of the weights, by the whole tensor they lie in."""
        yield from self._named(self.part_weights)

    def _named(self, part: Tensor) -> Iterator[tuple[str, Tensor]]:
        for entry, span in self.spans():
            ours = span.overlap(self.own)
            if ours.size:
                yield entry.pieces[0].name, ours.after(self.own.start).inside(part)

    def _free_grads(self) -> None:
        _resize(self.grads, 0)
        self.has_grads = False


def _resize(flat: Tensor, num_elements: int) -> None:
    """Give a tensor's storage room for so many elements, or none; its views stay what they are."""
    flat.untyped_storage().resize_(num_elements * flat.element_size())
