"""The contract of a dispatcher: bringing tokens to the ranks that hold their experts, and back.

Six steps, so that a schedule can run the two that communicate beside other work: ``pack``, *``send``*, ``arrange``, the
experts, ``collect``, *``send_back``*, ``unpack``. All are plain autograd: gradients go back the way the values came.
Every rank takes part even when no token reaches it.

Shapes: L tokens of this rank, K experts per token, H hidden, R rows at this rank's experts.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moeplan.kernels.row_map import RowMap

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Arrived:
    """Rows [R, H] at this rank's experts, sorted by expert, with their probabilities [R] where those travel along.

    ``offsets`` [local experts] is where the rows of each end. ``copied``: by which map rows are copies of this rank's
    tokens, several of each and none dropped; None where they came from elsewhere as well.
    """

    rows: Tensor
    probs: Tensor | None
    offsets: Tensor
    copied: RowMap | None = None


class Exchange(Protocol):
    """The way of the tokens of one forward of one layer. Holds indices and sizes, no tensor with a gradient."""

    def send(self, packed: Tensors) -> Tensors:
        """Communication: what ``pack`` prepared, at the ranks of the experts."""
        ...

    def arrange(self, arrived: Tensors) -> Arrived:
        """What arrived, sorted by expert."""
        ...

    def collect(self, rows_RH: Tensor, probs_R: Tensor | None) -> Tensor:
        """Outputs of the experts made ready for the way back; ``probs_R`` as :class:`Arrived` had them."""
        ...

    def send_back(self, rows: Tensor) -> Tensor:
        """Communication: what ``collect`` prepared, at the ranks that the tokens came from."""
        ...

    def unpack(self, rows: Tensor, probs_LK: Tensor) -> Tensor:
        """y_LH: the sum over each token's experts; ``probs_LK`` as ``pack`` had them."""
        ...


class Dispatcher(Protocol):
    """Built once a layer. Outputs are weighed by probability once: by the experts, or by ``collect`` or ``unpack``.

    The experts weigh, with ``Arrived.probs``, before their second matrix under memory-efficient permutation.
    """

    def pack(self, x_LH: Tensor, expert_index_LK: Tensor, probs_LK: Tensor) -> tuple[Tensors, Exchange]:
        """What this rank sends, and how it travels. An index equal to the number of experts is a dropped copy."""
        ...


def dispatch(dispatcher: Dispatcher, x_LH: Tensor, index_LK: Tensor, probs_LK: Tensor) -> tuple[Arrived, Exchange]:
    """All steps up to the experts, one after another."""
    packed, exchange = dispatcher.pack(x_LH, index_LK, probs_LK)
    return exchange.arrange(exchange.send(packed)), exchange


def combine(exchange: Exchange, rows_RH: Tensor, arrived: Arrived, probs_LK: Tensor) -> Tensor:
    """All steps from the experts' outputs back to y_LH, one after another."""
    return exchange.unpack(exchange.send_back(exchange.collect(rows_RH, arrived.probs)), probs_LK)
