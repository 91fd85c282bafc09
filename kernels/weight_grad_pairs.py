"""Weight gradients of experts added for two micro-batches at a time.

Adding a gradient to fp32 main gradients reads and writes 8 bytes a weight, however few rows it sums. Experts have many
weights and few rows each, so every second micro-batch adds both at once; the operands of the first wait in memory.
bf16 rows that are copies of tokens wait as those tokens, and are copied again when their partner is here; operands in
FP8 wait as they are (:class:`moeplan.kernels.quantized_gemm.QuantizedOperands`).

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""
# ruff: noqa: N815 - shape suffixes

from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

from torch import Tensor

from moeplan.kernels.permute import permute, unpermute
from moeplan.kernels.row_map import RowMap


class Factors(Protocol):
    """What the weight gradients of one micro-batch are products of."""

    @property
    def nbytes(self) -> int:
        """Of both, as they are now."""
        ...

    def put_aside(self) -> Self:
        """The same in as little memory as gives them back, to wait for another micro-batch's."""
        ...

    def brought_back(self) -> Self:
        """What :meth:`put_aside` was made of."""
        ...


FactorsT = TypeVar("FactorsT", bound=Factors)


@dataclass(frozen=True, slots=True)
class Operands:
    """What the weight gradients of one micro-batch are products of; ``offsets_E`` is where each expert's rows end.

    ``copied``: the map without gaps by which rows of x are copies of tokens, if they are nothing else.
    """

    x_TH: Tensor
    grad_TF: Tensor
    offsets_E: Tensor
    copied: RowMap | None = None

    @property
    def nbytes(self) -> int:
        """Of both factors."""
        return self.x_TH.nbytes + self.grad_TF.nbytes

    def put_aside(self) -> "Operands":
        """The same with tokens for x, each from the first of its copies, where it has copies."""
        if self.copied is None:
            return self
        first = replace(self.copied, row_of_slot_TK=self.copied.row_of_slot_TK[:, :1].contiguous())
        return replace(self, x_TH=unpermute(self.x_TH, first))  # sums of one row each

    def brought_back(self) -> "Operands":
        """What :meth:`put_aside` was made of, bit by bit but for the sign of zeros."""
        return self if self.copied is None else replace(self, x_TH=permute(self.x_TH, self.copied))


class Pairs:
    """Who waits for whom among the ``num_micro_batches`` of a step; of an odd number the first goes alone.

    So none waits when the last micro-batch of a step has come. All factors of a weight are of one kind.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self._num_taken = 0
        self._waiting: Factors | None = None

    @property
    def waiting_bytes(self) -> int:
        """Of the operands that wait."""
        return 0 if self._waiting is None else self._waiting.nbytes

    def take(self, factors: FactorsT) -> tuple[FactorsT, ...]:
        """What to add now that the next micro-batch's factors are here: none, they alone, or those of two."""
        is_alone = self._num_taken == 0 and self.num_micro_batches % 2 == 1
        self._num_taken = (self._num_taken + 1) % self.num_micro_batches
        if is_alone:
            return (factors,)
        if self._waiting is None:
            self._waiting = factors.put_aside()
            return ()
        first, self._waiting = self._waiting, None
        assert isinstance(first, type(factors))
        return first.brought_back(), factors
