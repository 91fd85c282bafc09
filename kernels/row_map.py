"""Where each routed copy of a token goes when copies are sorted by expert. Built once per forward, on the device.

Shapes: T tokens, K experts per token, R rows (copies; T * K unless some are dropped or padded), E experts. A slot is
t * K + k.
"""
# ruff: noqa: N802, N815 - shape suffixes

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowMap:
    """The permutation between slots and rows; every index is int32 and stays on the device.

    ``slot_of_row_R`` and ``row_of_slot_TK`` are inverse to each other; ``offsets_E`` is where the rows of each expert
    end, as :func:`moeplan.kernels.grouped_gemm.grouped_gemm` takes it. Under ``has_gaps`` a dropped slot has row -1,
    and a row of padding has slot -1: it is zero, and nothing comes of it.
    """

    slot_of_row_R: Tensor
    row_of_slot_TK: Tensor
    offsets_E: Tensor
    has_gaps: bool = False

    @property
    def token_of_row_R(self) -> Tensor:
        """-1 for a row of padding."""
        return self.slot_of_row_R // self.row_of_slot_TK.shape[1]

    @property
    def num_rows_E(self) -> Tensor:
        """Rows of each expert, int32."""
        return torch.diff(self.offsets_E, prepend=self.offsets_E.new_zeros(1))

    def first(self, num_rows: int) -> "RowMap":
        """The map without what follows the rows of experts: dropped copies. ``num_rows`` is the last offset."""
        return (
            self if num_rows == len(self.slot_of_row_R) else replace(self, slot_of_row_R=self.slot_of_row_R[:num_rows])
        )


def row_map(expert_index_TK: Tensor, num_experts: int, *, has_gaps: bool = False) -> RowMap:
    """The map that sorts the copies of tokens by expert, stable in token order; never waits for the device.

    ``expert_index_TK`` holds integers from 0 to ``num_experts`` - 1; under ``has_gaps`` also ``num_experts`` for copies
    that are dropped, which come last: take them off with :meth:`RowMap.first`. Received rows whose expert is known are
    sorted the same way, with K = 1.
    """
    if expert_index_TK.is_cuda and not has_gaps:
        from moeplan.kernels import row_map_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

        slot_of_row_R, row_of_slot_R, offsets_E = row_map_triton.sort_rows(expert_index_TK, num_experts)
        return RowMap(slot_of_row_R, row_of_slot_R.view(expert_index_TK.shape), offsets_E)
    expert_of_row_R, order_R, offsets_E = _sorted(expert_index_TK, num_experts)
    row_R = torch.arange(len(order_R), dtype=torch.int32, device=order_R.device)
    if has_gaps:
        row_R = torch.where(expert_of_row_R < num_experts, row_R, -1)
    row_of_slot_R = torch.empty_like(row_R)
    row_of_slot_R[order_R] = row_R
    return RowMap(order_R.to(torch.int32), row_of_slot_R.view(expert_index_TK.shape), offsets_E, has_gaps)


def padded_row_map(expert_index_TK: Tensor, num_experts: int, capacity: int) -> RowMap:
    """The map that gives each expert ``capacity`` rows, the last of them padding: its shapes depend on no routing.

    No expert may be chosen more often than that; ``num_experts`` marks a dropped copy.
    """
    expert_of_row_R, order_R, offsets_E = _sorted(expert_index_TK, num_experts)
    place_R = torch.arange(len(order_R), dtype=torch.int32, device=order_R.device)
    starts_E = torch.cat([offsets_E.new_zeros(1), offsets_E])  # one more: of dropped copies
    row_R = expert_of_row_R * capacity + place_R - starts_E[expert_of_row_R]
    num_rows, is_kept_R = num_experts * capacity, expert_of_row_R < num_experts
    row_of_slot_R = torch.empty_like(place_R)
    row_of_slot_R[order_R] = torch.where(is_kept_R, row_R, -1)
    slot_of_row_R = row_R.new_full((num_rows + 1,), -1)  # the row beyond the last takes what is dropped
    slot_of_row_R[torch.where(is_kept_R, row_R, num_rows)] = order_R.to(torch.int32)
    ends_E = torch.arange(1, num_experts + 1, dtype=torch.int32, device=order_R.device) * capacity
    return RowMap(slot_of_row_R[:num_rows], row_of_slot_R.view(expert_index_TK.shape), ends_E, has_gaps=True)


def _sorted(expert_index_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts of all copies in order, the slots they come from, and where each expert ends."""
    expert_of_row_R, order_R = torch.sort(expert_index_TK.to(torch.int32).flatten(), stable=True)
    experts_E = torch.arange(num_experts, dtype=torch.int32, device=order_R.device)
    offsets_E = torch.searchsorted(expert_of_row_R, experts_E, right=True, out_int32=True)
    return expert_of_row_R, order_R, offsets_E
