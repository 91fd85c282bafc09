"""GEMMs of quantized operands, each expert's rows with that expert's weight; a dense matrix is one expert.

Operands are quantized first, in both forms that their GEMMs need: summed over width in forward and input gradients,
summed over rows in weight gradients. One file a back end; ``reference`` has exactly the numbers of every recipe.

Shapes: R rows sorted by expert, P padded rows, C columns, E experts, A and B sides of a weight, M and N of a gradient.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moeplan.kernels.padded_rows import TILE, PaddedRows
from moeplan.kernels.recipes import RECIPES, Recipe
from moeplan.kernels.row_map import RowMap

# Data as stored, the scales of its blocks or tensor, and where the recipe has one the scale above those.
Stored = tuple[Tensor, Tensor, Tensor | None]


class Pair(NamedTuple):
    """Rows: data [P, C] to be summed over C, and ``turned`` [C, P] to be summed over P.

    Weights: data [E, A, B] to be summed over B, and ``turned`` [E, B, A] to be summed over A.
    """

    as_is: Stored
    turned: Stored


def stored_bytes(stored: Stored) -> int:
    """Of the data and its scales."""
    return sum(tensor.nbytes for tensor in stored if tensor is not None)


class QuantizedOperands(NamedTuple):
    """What the weight gradients a @ b.T of one micro-batch are products of: a [M, P] and b [N, P], both ``turned``.

    They may wait for another's (:mod:`moeplan.kernels.weight_grad_pairs`), as they are: rows, whatever these are copies
    of, because tokens would have to be quantized again.
    """

    a: Stored
    b: Stored
    rows: PaddedRows

    @property
    def nbytes(self) -> int:
        """Of both factors."""
        return stored_bytes(self.a) + stored_bytes(self.b)

    def put_aside(self) -> "QuantizedOperands":
        """See :class:`moeplan.kernels.weight_grad_pairs.Factors`."""
        return self

    def brought_back(self) -> "QuantizedOperands":
        """See :class:`moeplan.kernels.weight_grad_pairs.Factors`."""
        return self


class QuantizedGemm(Protocol):
    """A back end."""

    def amax(self, x: Tensor) -> Tensor:
        """The largest magnitude in fp32, on the device."""
        ...

    def quantize_rows(
        self, x_RC: Tensor, rows: PaddedRows, recipe: Recipe, *, is_gradient: bool, amax: Tensor | None = None,
        copied: RowMap | None = None,
    ) -> Pair:  # fmt: skip
        """Inputs, or gradients of outputs; ``amax`` instead of that of x where one scale covers a tensor.

        ``copied``: the map without gaps by which rows are copies of x, which then holds tokens [T, C].
        """
        ...

    def weight_amax(self, weight_EAB: Tensor, recipe: Recipe) -> Tensor:
        """Largest magnitudes, fp32, of what shares a scale, for recipes that scale both forms of a weight alike.

        [E] of whole experts, or [E, A / 128, B / 128] of blocks. A weight in fp32 is rounded to bf16 first.
        """
        ...

    def quantize_weights(self, weight_EAB: Tensor, recipe: Recipe, amax: Tensor | None = None) -> Pair:
        """Weights, with scales of their own for each expert; ``amax`` as :meth:`weight_amax` has it, of a whole weight.

        Given, it scales a part of the weight as the whole would be. A weight in fp32 is rounded to bf16 first.
        """
        ...

    def weight_scales(self, amax: Tensor, shape: tuple[int, ...], recipe: Recipe) -> tuple[Tensor, Tensor]:
        """Scales of both forms of a weight of ``shape`` [E, A, B] from what :meth:`weight_amax` found."""
        ...

    def multiply(
        self, x: Stored, weight: Stored, rows: PaddedRows, recipe: Recipe, *, is_gradient: bool = False
    ) -> Tensor:
        """y_RA in bf16: rows times the weight [E, A, B] of their expert, summed over B.

        ``is_gradient``: of an input; where it has many products it is summed as exactly as a weight's.
        """
        ...

    def gradient_(self, total_EMN: Tensor, parts: Sequence[QuantizedOperands], recipe: Recipe, *, add: bool) -> None:
        """Each expert's a @ b.T over its rows, added to ``total_EMN`` or written over it.

        Of one micro-batch or of two, whose sum is then added in one pass over ``total_EMN`` where a back end can.
        """
        ...


def _reference() -> QuantizedGemm:
    from moeplan.kernels import quantized_gemm_reference  # noqa: PLC0415 - one back end is loaded, not all

    return quantized_gemm_reference


def _triton() -> QuantizedGemm:
    from moeplan.kernels import quantized_gemm_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

    return quantized_gemm_triton


def _torch_blackwell() -> QuantizedGemm:
    from moeplan.kernels import quantized_gemm_blackwell  # noqa: PLC0415 - one back end is loaded, not all

    return quantized_gemm_blackwell


BACKENDS = {"reference": _reference, "triton": _triton, "torch_blackwell": _torch_blackwell}


def backend_of(recipe_name: str, weight: Tensor) -> str:
    """The back end whose kernels take a weight [.., A, B] where it lies; ``reference`` where none does."""
    scaling = RECIPES[recipe_name].scaling
    major = torch.cuda.get_device_capability(weight.device)[0] if weight.is_cuda else 0
    if scaling.scale != "fp32":
        return "torch_blackwell" if major == 10 and _blackwell_takes(weight) else "reference"
    whole = scaling.block is None or all(side % TILE == 0 for side in weight.shape[-2:])
    return "triton" if major >= 9 and whole else "reference"


def _blackwell_takes(weight: Tensor) -> bool:
    from moeplan.kernels import quantized_gemm_blackwell as blackwell  # noqa: PLC0415 - as above

    if any(side % blackwell.ALIGNMENT for side in weight.shape[-2:]):
        return False
    num = len(weight) if weight.dim() == 3 else 1
    return num == 1 or (num <= blackwell.MAX_EXPERTS and blackwell.has_grouped_kernels())
