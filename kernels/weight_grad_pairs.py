"""Weight gradients of experts added for two micro-batches at a time.

Adding a gradient to fp32 main gradients reads and writes 8 bytes a weight, however few rows it sums. Experts have many
weights and few rows each, so every second micro-batch adds both at once; the operands of the first wait in memory.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""
# ruff: noqa: N815 - shape suffixes

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Operands:
    """What the weight gradients of one micro-batch are products of; ``offsets_E`` is where each expert's rows end.

    Where ``gathers`` names one of them it holds tokens, and ``token_R`` which of them each row is.
    """

    x_TH: Tensor
    grad_TF: Tensor
    offsets_E: Tensor
    token_R: Tensor | None = None
    gathers: Literal["x", "grad", "none"] = "none"

    @property
    def num_rows(self) -> int:
        """Rows of all experts."""
        return len(self.x_TH if self.token_R is None else self.token_R)

    def copied(self) -> "Operands":
        """The same with rows in place of tokens."""
        if self.token_R is None:
            return self
        x, grad = self.x_TH, self.grad_TF
        if self.gathers == "x":
            x = x.index_select(0, self.token_R)
        else:
            grad = grad.index_select(0, self.token_R)
        return Operands(x, grad, self.offsets_E)

    @property
    def nbytes(self) -> int:
        """Of both factors."""
        return self.x_TH.nbytes + self.grad_TF.nbytes


class Pairs:
    """Who waits for whom among the ``num_micro_batches`` of a step; of an odd number the first goes alone.

    So none waits when the last micro-batch of a step has come.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self._num_taken = 0
        self._waiting: Operands | None = None

    @property
    def waiting_bytes(self) -> int:
        """Of the operands that wait."""
        return 0 if self._waiting is None else self._waiting.nbytes

    def take(self, operands: Operands) -> tuple[Operands, ...]:
        """What to add now that the next micro-batch's operands are here: none, they alone, or those of two."""
        is_alone = self._num_taken == 0 and self.num_micro_batches % 2 == 1
        self._num_taken = (self._num_taken + 1) % self.num_micro_batches
        if is_alone:
            return (operands,)
        if self._waiting is None:
            self._waiting = operands
            return ()
        first, self._waiting = self._waiting, None
        return first, operands
