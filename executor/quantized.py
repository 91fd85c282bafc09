"""Linear layers and grouped GEMMs of quantized operands, for weights that a plan's recipe names.

Backward keeps the input's form for its weight gradient, at the recipe's width, unless the input is to be dropped and
made again: then the input itself is kept and quantized a second time (report section 1.6).

Shapes: R rows sorted by expert, I input width, O output width, E experts, A and B sides of a weight as it is stored.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moeplan.executor.collectives import all_gather_raw, reduce_scatter_raw
from moeplan.executor.mesh import Group
from moeplan.executor.scopes import scope
from moeplan.kernels.grouped_gemm import grouped_gemm
from moeplan.kernels.main_grad import MainGrad, main_grad_of
from moeplan.kernels.padded_rows import PaddedRows, dense_rows, padded_rows
from moeplan.kernels.quantized_gemm import (
    BACKENDS,
    Pair,
    QuantizedGemm,
    QuantizedOperands,
    Stored,
    backend_of,
    stored_bytes,
)
from moeplan.kernels.recipes import RECIPES
from moeplan.kernels.row_map import RowMap
from moeplan.kernels.weight_grad_queue import now_or_later

_ATTRIBUTE = "quantized_weight"


class QuantizedWeight:
    """How one weight is multiplied: its recipe, its copies of this step, its operands' largest magnitudes of the last.

    ``is_input_first``: stored [.., I, O] as experts are, not [O, I]. ``keeps_input``: see the module. ``is_cached``:
    copies live until :meth:`end_step`, made by the first forward of a step.
    """

    def __init__(
        self, recipe_name: str, *, is_input_first: bool = False, keeps_input: bool = False, is_cached: bool = True
    ) -> None:
        self.recipe_name, self.recipe = recipe_name, RECIPES[recipe_name]
        self.is_input_first, self.keeps_input, self.is_cached = is_input_first, keeps_input, is_cached
        self._copies: Pair | None = None
        self.copy_bytes = 0  # of the copies made last, beside the weight itself
        self._last_amax: dict[bool, Tensor] = {}
        self._amax: dict[bool, Tensor] = {}

    def backend(self, weight: Tensor) -> QuantizedGemm:
        """The back end for this weight where it lies."""
        return BACKENDS[backend_of(self.recipe_name, weight)]()

    def copies(self, weight: Tensor) -> Pair:
        """The weight [E, A, B] quantized along B, and turned along A."""
        if self._copies is not None:
            return self._copies
        with torch.no_grad(), scope("optimizer"):
            copies = self.backend(weight).quantize_weights(_stacked(weight), self.recipe)
        if self.is_cached:
            self._copies, self.copy_bytes = copies, stored_bytes(copies.as_is) + stored_bytes(copies.turned)
        return copies

    def take(self, copies: Pair) -> None:
        """Copies of a weight that has no other form; the first is where the weight itself is counted."""
        self._copies, self.copy_bytes = copies, stored_bytes(copies.turned)

    def forward_copy(self, weight: Tensor) -> Stored:
        """[E, O, I], summed over I."""
        copies = self.copies(weight)
        return copies.turned if self.is_input_first else copies.as_is

    def backward_copy(self, weight: Tensor) -> Stored:
        """[E, I, O], summed over O."""
        copies = self.copies(weight)
        return copies.as_is if self.is_input_first else copies.turned

    def amax(self, x: Tensor, backend: QuantizedGemm, *, is_gradient: bool, is_training: bool) -> Tensor | None:
        """What scales x where one scale covers it; None: the recipe has blocks.

        Under delayed scaling that of the last step (this one's until there is one), and in training x counts for the
        next. Ranks do not share theirs, and a resumed run starts anew.
        """
        if self.recipe.scaling.block is not None:
            return None
        now = backend.amax(x)
        if not self.recipe.is_delayed:
            return now
        if is_training:
            before = self._amax.get(is_gradient)
            self._amax[is_gradient] = now if before is None else torch.maximum(before, now)
        return self._last_amax.get(is_gradient, now)

    def end_step(self) -> None:
        """The weight has changed: its copies are void, and what was seen in this step scales the next."""
        self._copies = None
        if self._amax:
            self._last_amax, self._amax = self._amax, {}


def set_quantized(parameter: Tensor, quantized: QuantizedWeight) -> None:
    """Multiply by ``parameter`` in low precision from now on."""
    setattr(parameter, _ATTRIBUTE, quantized)


def quantized_of(parameter: Tensor) -> QuantizedWeight | None:
    """How to multiply by ``parameter``; None: as it is."""
    quantized: QuantizedWeight | None = getattr(parameter, _ATTRIBUTE, None)
    return quantized


def _stacked(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 3 else weight[None]


def weight_gradient(
    quantized: QuantizedWeight, weight: Tensor, main: MainGrad | None, *, x: Stored, grad: Stored, rows: PaddedRows
) -> Tensor | None:
    """What backward hands to autograd for the weight: nothing where ``main`` takes its gradient.

    Where ``main`` takes two micro-batches at a time, the first of two waits for the second.
    """
    backend = quantized.backend(weight)
    operands = QuantizedOperands(*((x, grad) if quantized.is_input_first else (grad, x)), rows)
    if main is None:
        total = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        backend.gradient_(_stacked(total), (operands,), quantized.recipe, add=False)
        return total

    def add() -> None:
        parts = main.due(operands)
        if not parts:
            return
        with scope("expert_gemm" if quantized.is_input_first else "dense_gemm"):
            backend.gradient_(_stacked(main.total), parts, quantized.recipe, add=not main.is_clear)
            main.is_clear = False

    now_or_later(add)
    return None


class _QuantizedLinear(Function):
    """Gathers the rows of a tensor-parallel group (of one: has them), and again in backward."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        x_LI: Tensor,
        weight: Tensor,
        offsets_E: Tensor | None,
        group: Group | None,
        is_training: bool,  # noqa: FBT001
    ) -> Tensor:
        quantized = quantized_of(weight)
        assert quantized is not None
        ctx.quantized, ctx.group, ctx.main_grad = quantized, group, main_grad_of(weight)
        x_TI = _gathered(x_LI, group)
        ctx.rows = rows = _rows(x_TI, offsets_E)
        pair = quantize_operand(quantized, weight, x_TI, rows, is_gradient=False, is_training=is_training)
        is_split = group is not None and group.size > 1
        if quantized.keeps_input or is_split:
            ctx.save_for_backward(weight, x_LI)
        else:
            ctx.save_for_backward(weight, *pair.turned)
        return (
            quantized.backend(weight)
            .multiply(pair.as_is, quantized.forward_copy(weight), rows, quantized.recipe)
            .to(x_LI.dtype)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        quantized, group, rows = ctx.quantized, ctx.group, ctx.rows
        weight, *saved = ctx.saved_tensors
        grad = quantize_operand(quantized, weight, grad_TO, rows, is_gradient=True)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            backward_copy = quantized.backward_copy(weight)
            grad_x = quantized.backend(weight).multiply(
                grad.as_is, backward_copy, rows, quantized.recipe, is_gradient=True
            )
            if group is not None and group.size > 1:
                with scope("tp_comm"):
                    grad_x = reduce_scatter_raw(grad_x, group)
        if ctx.needs_input_grad[1]:
            x = cast("Stored", tuple(saved))
            if len(saved) == 1:
                x = quantize_operand(quantized, weight, _gathered(saved[0], group), rows, is_gradient=False).turned
            grad_weight = weight_gradient(quantized, weight, ctx.main_grad, x=x, grad=grad.turned, rows=rows)
        return grad_x, grad_weight, None, None, None


def _gathered(x_LI: Tensor, group: Group | None) -> Tensor:
    if group is None or group.size == 1:
        return x_LI
    with scope("tp_comm"):
        return all_gather_raw(x_LI, group)


def _rows(x_RI: Tensor, offsets_E: Tensor | None) -> PaddedRows:
    return dense_rows(len(x_RI), x_RI.device) if offsets_E is None else padded_rows(offsets_E, len(x_RI))


def quantize_operand(
    quantized: QuantizedWeight, weight: Tensor, x_RC: Tensor, rows: PaddedRows, *, is_gradient: bool,
    is_training: bool = True, copied: RowMap | None = None,
) -> Pair:  # fmt: skip
    """An input, or the gradient of an output, in both forms; of tokens where rows are copies of them by ``copied``."""
    backend = quantized.backend(weight)
    with scope("permute" if quantized.is_input_first else "elementwise"):
        amax = quantized.amax(x_RC, backend, is_gradient=is_gradient, is_training=is_training)
        return backend.quantize_rows(x_RC, rows, quantized.recipe, is_gradient=is_gradient, amax=amax, copied=copied)


def quantized_linear(x_LI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, group: Group | None = None) -> Tensor:
    """y_TO = x of every rank of ``group`` times a weight of :func:`set_quantized`."""
    with scope("dense_gemm"):
        y_TO = cast("Tensor", _QuantizedLinear.apply(x_LI, weight_OI, None, group, torch.is_grad_enabled()))
        return y_TO if bias_O is None else y_TO + bias_O


def expert_gemm(x_RI: Tensor, weight_EIO: Tensor, offsets_E: Tensor, copied: RowMap | None = None) -> Tensor:
    """y_RO = rows times the weight of their expert, whose rows end at ``offsets_E``, in its precision.

    ``copied`` as :func:`moeplan.kernels.grouped_gemm.grouped_gemm` has it, of weights that are not quantized.
    """
    if quantized_of(weight_EIO) is None:
        return grouped_gemm(x_RI, weight_EIO, offsets_E, copied=copied)
    return cast("Tensor", _QuantizedLinear.apply(x_RI, weight_EIO, offsets_E, None, torch.is_grad_enabled()))
