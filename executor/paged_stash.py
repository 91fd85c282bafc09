"""Paged stash: kept rows of experts wait for backward in pages of one buffer, however many each expert got.

Under natural routing every layer and micro-batch keeps another number of rows, and an allocator of whole tensors needs
room for the worst of each. Pages of 64 rows need room for the sum of what there is (report section 3.5). Pages are
taken from and given back to a ring of free ones on the device; where too few are left, a tensor stays as it is.

Shapes: R rows of a tensor, W width of a row, P pages.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil

import torch
from torch import Tensor

from moeplan.executor.saved_tensors import Restore, is_parameter, keeping, storage_key
from moeplan.pipeline_order import paired_order, rank_order
from moeplan.plan import Plan

PAGE_ROWS = 64


class PagePool:
    """Pages of rows of one width and dtype. All work on them is in the order of the current stream."""

    def __init__(self, num_pages: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.empty(num_pages * PAGE_ROWS, width, dtype=dtype, device=device)
        self._ring = torch.arange(num_pages, device=device)  # numbers of free pages, from head to tail
        self._head, self._num_free = 0, num_pages

    @property
    def num_free(self) -> int:
        return self._num_free

    def take(self, num_pages: int) -> Tensor | None:
        """Numbers of pages that nobody else has; None where too few are free."""
        if num_pages > self._num_free:
            return None
        pages = self._ring[self._places(self._head, num_pages)]
        self._head, self._num_free = (self._head + num_pages) % len(self._ring), self._num_free - num_pages
        return pages

    def give_back(self, pages: Tensor) -> None:
        """Let others have the pages."""
        tail = (self._head + self._num_free) % len(self._ring)
        self._ring[self._places(tail, len(pages))] = pages
        self._num_free += len(pages)

    def _places(self, first: int, count: int) -> Tensor:
        return torch.arange(first, first + count, device=self._ring.device) % len(self._ring)


class _Stashed:
    """Rows in pages; the pages are free again when no saved tensor needs them."""

    def __init__(self, rows_RW: Tensor, pages: Tensor, pool: PagePool) -> None:
        self._pages, self._pool, self._num_rows = pages, pool, len(rows_RW)
        pool.rows.index_copy_(0, self._places(), rows_RW.detach())

    def restore(self) -> Tensor:
        """The rows, in a tensor of their own."""
        return self._pool.rows.index_select(0, self._places())

    def _places(self) -> Tensor:
        places_PR = self._pages[:, None] * PAGE_ROWS + torch.arange(PAGE_ROWS, device=self._pages.device)
        return places_PR.flatten()[: self._num_rows]

    def __del__(self) -> None:
        self._pool.give_back(self._pages)


class PagedStash:
    """The stash of one pipeline rank: room for ``num_rows`` rows of each of ``widths``, which may be alike."""

    def __init__(self, num_rows: int, widths: Sequence[int], device: torch.device) -> None:
        self._num_pages, self._device = ceil(num_rows / PAGE_ROWS), device
        self._num_alike = Counter(widths)
        self.pools: dict[tuple[int, torch.dtype], PagePool] = {}
        self.num_spilled = 0  # tensors that found too few pages

    @contextmanager
    def holding(self, num_rows: int) -> Iterator[None]:
        """Keep matrices of ``num_rows`` rows that are saved inside in pages."""
        # With the tensors themselves, whose addresses others would have once they are gone.
        stashed: dict[tuple[object, ...], tuple[Tensor, _Stashed]] = {}

        def keeper(tensor: Tensor) -> Restore | None:
            is_matrix = tensor.dim() == 2 and tensor.is_contiguous() and tensor.is_floating_point()
            if not is_matrix or len(tensor) != num_rows or is_parameter(tensor):
                return None
            if tensor.shape[1] not in self._num_alike:
                return None
            key = storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.dtype
            if key not in stashed:
                pool = self._pool(tensor)
                pages = pool.take(ceil(num_rows / PAGE_ROWS))
                if pages is None:
                    self.num_spilled += 1
                    return None
                stashed[key] = tensor.detach(), _Stashed(tensor, pages, pool)
            return stashed[key][1].restore

        with keeping(keeper):
            yield
        stashed.clear()  # from here on saved tensors alone hold their pages

    def _pool(self, tensor: Tensor) -> PagePool:
        key = tensor.shape[1], tensor.dtype
        if key not in self.pools:
            self.pools[key] = PagePool(self._num_pages * self._num_alike[tensor.shape[1]], *key, self._device)
        return self.pools[key]


def build_stash(plan: Plan, rank: int, device: torch.device) -> PagedStash | None:
    """Room for the plan's factor over balanced rows of all layers that pipeline rank ``rank`` has in flight at once.

    None where the plan has no paged stash. A layer's experts hold tokens x top_k x etp rows of a micro-batch.
    """
    moe = plan.model.moe
    if not plan.paged_stash_factor or moe is None:
        return None
    balanced = plan.tokens_per_rank * moe.top_k * plan.etp
    width, gates = moe.expert_ffn_size // plan.etp, plan.model.mlp_matrices - 1
    widths = (plan.model.expert_hidden_size, gates * width, width)
    return PagedStash(ceil(plan.paged_stash_factor * balanced * layers_in_flight(plan, rank)), widths, device)


def layers_in_flight(plan: Plan, rank: int) -> int:
    """Most MoE layers of a pipeline rank, each of one micro-batch, between their forward and their backward."""
    kinds, model = plan.model.layer_kinds, plan.model
    sizes = [
        sum(kinds[layer].mlp == "moe" for layer in stage.layers) + stage.num_mtp * (model.mtp_kind.mlp == "moe")
        for stage in plan.pipeline.stages_of_rank(plan.pp, rank)
    ]
    schedule = (plan.pp, plan.vp, plan.num_micro_batches, rank, plan.micro_batch_group_size)
    held = most = 0
    if plan.ep_overlap:
        steps = [step for pair in paired_order(*schedule) for step in pair if step is not None]
    else:
        steps = list(rank_order(*schedule))
    for step in steps:
        held += sizes[step.chunk] if step.kind == "F" else -sizes[step.chunk]
        most = max(most, held)
    return most
