"""Low-precision recipes: what the operands of a GEMM are stored in, and what shares a scale (report section 5.1).

Every operand is quantized along the dimension its GEMM sums over, so inputs, weights and gradients each have two
stored forms wherever scales are not those of the whole tensor.
"""

from dataclasses import dataclass
from typing import Literal

Element = Literal["e4m3", "e5m2", "e2m1"]
ScaleType = Literal["fp32", "e8m0", "e4m3"]

LARGEST: dict[Element, float] = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}


@dataclass(frozen=True, slots=True)
class Scaling:
    """``block``: elements along the sum that share a scale; None: the whole tensor (or expert) does.

    ``weight_rows``: neighbours across the sum that share it as well in a weight. A scale in ``e4m3`` has an fp32 one of
    the whole tensor above it.
    """

    block: int | None
    weight_rows: int = 1
    scale: ScaleType = "fp32"


@dataclass(frozen=True, slots=True)
class Recipe:
    """``element`` is of inputs and weights, ``grad_element`` of gradients of outputs.

    ``is_delayed``: a tensor's scale comes from the step before. ``hadamard``: width of the random Hadamard transform of
    both operands of a weight gradient (0: none). ``stochastic``: gradients are rounded so that their mean is kept.
    ``alignment``: multiple that both widths of a matrix must have to be quantized.
    """

    element: Element
    grad_element: Element
    scaling: Scaling
    alignment: int
    is_delayed: bool = False
    hadamard: int = 0
    stochastic: bool = False


# Hybrid FP8 (e5m2 gradients) where one scale has to cover a tensor, e4m3 throughout where blocks have their own.
# NVFP4's transform is 16 wide in the public recipe; the report gives no width.
RECIPES: dict[str, Recipe] = {
    "fp8_delayed": Recipe("e4m3", "e5m2", Scaling(None), 16, is_delayed=True),
    "fp8_current": Recipe("e4m3", "e5m2", Scaling(None), 16),
    "fp8_blockwise": Recipe("e4m3", "e4m3", Scaling(128, weight_rows=128), 16),
    "mxfp8": Recipe("e4m3", "e4m3", Scaling(32, scale="e8m0"), 32),
    "nvfp4": Recipe("e2m1", "e2m1", Scaling(16, weight_rows=16, scale="e4m3"), 16, hadamard=16, stochastic=True),
}
