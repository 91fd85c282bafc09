"""Gradients summed over the micro-batches of a step, which GEMMs add to instead of handing theirs to autograd.

A 16-bit gradient that autograd hands on costs 12 bytes a parameter and micro-batch (written, read, and added to fp32:
read and written); added by its GEMM it costs 8, and 4 in the first micro-batch, which writes without reading.
"""

from dataclasses import dataclass

from torch import Tensor

from moeplan.kernels.accumulate import accumulate_
from moeplan.kernels.weight_grad_pairs import FactorsT, Pairs

_ATTRIBUTE = "main_grad"


@dataclass(slots=True)
class MainGrad:
    """``total`` has the shape of its parameter. While ``is_clear``, nothing was added and its values mean nothing.

    ``pairs``: gradients of experts are added for two micro-batches at a time.
    """

    total: Tensor
    is_clear: bool = True
    pairs: Pairs | None = None

    def add_(self, part: Tensor) -> None:
        """One more gradient of the parameter's shape, in any dtype."""
        if self.is_clear:
            self.total.copy_(part)
        else:
            accumulate_(self.total, part)
        self.is_clear = False

    def due(self, factors: FactorsT) -> tuple[FactorsT, ...]:
        """What to add now that a micro-batch's factors are here: they alone, or what :meth:`Pairs.take` says."""
        return (factors,) if self.pairs is None else self.pairs.take(factors)

    def clear_(self) -> None:
        """Begin a step: the next gradient is written over the last step's."""
        self.is_clear = True

    def add_zeros_(self) -> None:
        """The gradient of a micro-batch without rows."""
        if self.is_clear:
            self.total.zero_()
            self.is_clear = False

    def finish_(self) -> None:
        """End a step: zeros where no gradient came."""
        assert self.pairs is None or not self.pairs.waiting_bytes, "a gradient waits for a micro-batch that never came"
        self.add_zeros_()


def set_main_grad(parameter: Tensor, main: MainGrad | None) -> None:
    """Let GEMMs with ``parameter`` as weight add to ``main`` from now on, and give autograd nothing for it."""
    setattr(parameter, _ATTRIBUTE, main)


def main_grad_of(parameter: Tensor) -> MainGrad | None:
    """Where the gradient of ``parameter`` goes; None: to autograd."""
    main: MainGrad | None = getattr(parameter, _ATTRIBUTE, None)
    return main
