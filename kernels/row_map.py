"""Where each routed copy of a token goes when copies are sorted by expert. Built once per forward, on the device.

Shapes: T tokens, K experts per token, R = T * K rows (copies), E experts. A slot is t * K + k.
"""
# ruff: noqa: N802, N815 - shape suffixes

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowMap:
    """The permutation between slots and rows; every index is int32 and stays on the device.

    ``slot_of_row_R`` and ``row_of_slot_TK`` are inverse to each other; ``offsets_E`` is where the rows of each expert
    end, as :func:`moeplan.kernels.grouped_gemm.grouped_gemm` takes it.
    """

    slot_of_row_R: Tensor
    row_of_slot_TK: Tensor
    offsets_E: Tensor

    @property
    def token_of_row_R(self) -> Tensor:
        return self.slot_of_row_R // self.row_of_slot_TK.shape[1]

    @property
    def num_rows_E(self) -> Tensor:
        """Rows of each expert, int32."""
        return torch.diff(self.offsets_E, prepend=self.offsets_E.new_zeros(1))


def row_map(expert_index_TK: Tensor, num_experts: int) -> RowMap:
    """The map that sorts the copies of tokens by expert, stable in token order; never waits for the device.

    ``expert_index_TK`` holds integers from 0 to ``num_experts`` - 1. Received rows whose expert is known are sorted
    the same way, with K = 1.
    """
    expert_of_row_R, order_R = torch.sort(expert_index_TK.to(torch.int32).flatten(), stable=True)
    slot_of_row_R = order_R.to(torch.int32)
    row_of_slot_R = torch.empty_like(slot_of_row_R)
    row_of_slot_R[order_R] = torch.arange(len(order_R), dtype=torch.int32, device=order_R.device)
    experts_E = torch.arange(num_experts, dtype=torch.int32, device=order_R.device)
    offsets_E = torch.searchsorted(expert_of_row_R, experts_E, right=True, out_int32=True)
    return RowMap(slot_of_row_R, row_of_slot_R.view(expert_index_TK.shape), offsets_E)
