"""Which matrices a plan's precision quantizes: the recipe part by part (report section 5.2).

Quantized: projections of attention, linear mixers and latents, dense and shared MLPs, routed experts, and the
projection before a layer of MTP.
Not: embedding, head, router, gates, norms, convolutions and the cores of attention and recurrences, whose work is small
or whose errors add up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from moeplan.executor.attention import GroupedQueryAttention, LatentAttention
from moeplan.executor.gated_delta_net import GatedDeltaNetMixer
from moeplan.executor.mamba import Mamba
from moeplan.executor.mlp import Mlp
from moeplan.executor.moe import Experts, MoeBlock
from moeplan.executor.mtp import MtpLayer
from moeplan.executor.quantized import QuantizedWeight, set_quantized
from moeplan.kernels.recipes import RECIPES
from moeplan.plan import Plan
from moeplan.vocabulary import RecomputeModule


@dataclass(frozen=True)
class _Matrix:
    """A weight that may be quantized; ``input_of``: the recompute module that drops its input."""

    weight: nn.Parameter
    input_of: RecomputeModule | None = None
    is_input_first: bool = False


def _matrices(module: nn.Module) -> Iterator[_Matrix]:
    """Those that ``module`` itself multiplies by."""
    match module:
        case GroupedQueryAttention():
            yield _Matrix(module.qkv_weight, "layernorm")
            yield _Matrix(module.out_weight)
        case GatedDeltaNetMixer():
            yield from (_Matrix(module.in_weight, "layernorm"), _Matrix(module.out_weight))
        case LatentAttention():
            if module.q_down is not None:
                yield _Matrix(module.q_down, "layernorm")
            yield from (_Matrix(module.kv_down, "layernorm"), _Matrix(module.q_up), _Matrix(module.kv_up))
            yield _Matrix(module.out_weight)
        case Mlp():
            yield from (_Matrix(module.in_weight, "layernorm"), _Matrix(module.out_weight))
        case Experts():
            yield _Matrix(module.in_weight_EHF, is_input_first=True)
            yield _Matrix(module.out_weight_EFH, "moe_act", is_input_first=True)
        case Mamba():
            yield from (_Matrix(module.in_weight, "layernorm"), _Matrix(module.out_weight))
        case MoeBlock():
            if module.latent_down is not None and module.latent_up is not None:
                yield from (_Matrix(module.latent_down, "layernorm"), _Matrix(module.latent_up))
        case MtpLayer():
            yield _Matrix(module.projection)


def quantize_matrices(plan: Plan, model: nn.Module) -> None:
    """Let the matrices of ``model`` be multiplied as the plan's precision says.

    One whose widths on this rank are not multiples of the recipe's alignment stays as it is. Under full sharding copies
    are made at each use: between them a rank keeps no more than its part.
    """
    recipe = RECIPES.get(plan.precision)
    if recipe is None:
        return
    for matrix in (matrix for module in model.modules() for matrix in _matrices(module)):
        if all(side % recipe.alignment == 0 for side in matrix.weight.shape[-2:]):
            quantized = QuantizedWeight(
                plan.precision,
                is_input_first=matrix.is_input_first,
                keeps_input=matrix.input_of in plan.recompute,
                is_cached=plan.sharding != "full",
            )
            set_quantized(matrix.weight, quantized)
