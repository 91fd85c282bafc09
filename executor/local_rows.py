"""Tokens that have come to a rank, copied for each of its experts that wants them: shared by dispatchers by token.

Shapes: A tokens that arrived, K experts per token, H hidden, R rows of this rank's experts.
"""

from dataclasses import dataclass

from torch import Tensor

from moeplan.executor.exchange import Arrived, Tensors
from moeplan.executor.scopes import scope
from moeplan.kernels.permute import permute, permute_probs, unpermute
from moeplan.kernels.row_map import RowMap, padded_row_map, row_map


@dataclass(frozen=True)
class LocalRows:
    """Arranges and collects for a dispatcher that sends each token with all its probabilities."""

    rows: RowMap
    probs_before_fc2: bool

    def arrange(self, arrived: Tensors) -> Arrived:
        """Rows by expert of tokens [A, H] with their probabilities [A, K]."""
        x_AH, probs_AK = arrived
        with scope("permute"):
            return Arrived(permute(x_AH, self.rows), permute_probs(probs_AK, self.rows), self.rows.offsets_E)

    def collect(self, rows_RH: Tensor, probs_R: Tensor | None) -> Tensor:
        """y_AH: the sum over this rank's experts, weighed here unless the experts did."""
        with scope("permute"):
            if not self.probs_before_fc2:
                assert probs_R is not None
                rows_RH = rows_RH * probs_R.to(rows_RH.dtype)[:, None]
            return unpermute(rows_RH, self.rows)


def local_index(expert_index: Tensor, first: int, num_local: int) -> Tensor:
    """Indices among the ``num_local`` experts from ``first`` on; ``num_local`` for those of other ranks and dropped."""
    index = expert_index - first
    return index.masked_fill((index < 0) | (index >= num_local), num_local)


def local_row_map(local_index_AK: Tensor, num_local: int, capacity: int | None, num_rows: int | None = None) -> RowMap:
    """The map of arrived tokens to rows by expert: ``capacity`` each where given, else as many as there are.

    The host waits for the device unless it knows that number, or a capacity.
    """
    if capacity is not None:
        return padded_row_map(local_index_AK, num_local, capacity)
    rows = row_map(local_index_AK, num_local, has_gaps=True)
    return rows.first(int(rows.offsets_E[-1]) if num_rows is None else num_rows)
