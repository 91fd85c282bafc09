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
from moeplan.executor.decoder_layer import DecoderLayer
from moeplan.executor.gated_delta_net import GatedDeltaNetMixer
from moeplan.executor.mamba import Mamba
from moeplan.executor.mlp import Mlp
from moeplan.executor.moe import Experts, MoeBlock
from moeplan.executor.mtp import MtpLayer
from moeplan.executor.quantized import QuantizedWeight, set_quantized
from moeplan.kernels.recipes import RECIPES
from moeplan.plan import Plan
from moeplan.vocabulary import Bf16Module, PrecisionName, RecomputeModule, wide_precision


@dataclass(frozen=True)
class _Matrix:
    """A weight that may be quantized; ``input_of``: the recompute module that drops its input.

    ``part``: what the plan may keep out of low precision.
    """

    weight: nn.Parameter
    input_of: RecomputeModule | None = None
    is_input_first: bool = False
    part: Bf16Module | None = None


def _matrices(module: nn.Module) -> Iterator[_Matrix]:
    """Those that ``module`` itself multiplies by."""
    match module:
        case GroupedQueryAttention():
            yield _Matrix(module.qkv_weight, "layernorm", part="attention")
            yield _Matrix(module.out_weight, part="attention")
        case LatentAttention():
            if module.q_down is not None:
                yield _Matrix(module.q_down, "layernorm", part="attention")
            yield _Matrix(module.kv_down, "layernorm", part="attention")
            for weight in (module.q_up, module.kv_up, module.out_weight):
                yield _Matrix(weight, part="attention")
        case GatedDeltaNetMixer() | Mamba():
            yield from (_Matrix(module.in_weight, "layernorm"), _Matrix(module.out_weight, part="linear_out"))
        case Mlp():
            yield from (_Matrix(module.in_weight, "layernorm"), _Matrix(module.out_weight))
        case Experts():
            yield _Matrix(module.in_weight_EHF, is_input_first=True)
            yield _Matrix(module.out_weight_EFH, "moe_act", is_input_first=True)
        case MoeBlock():
            if module.latent_down is not None and module.latent_up is not None:
                yield _Matrix(module.latent_down, "layernorm", part="latent")
                yield _Matrix(module.latent_up, part="latent")
        case MtpLayer():
            yield _Matrix(module.projection)


def quantize_matrices(plan: Plan, model: nn.Module) -> None:
    """Let the matrices of ``model`` be multiplied as the plan's precision says.

    One whose widths on this rank are not multiples of the recipe's alignment stays as it is, and so do layers and parts
    that the plan keeps in bf16. Under full sharding copies are made at each use: between them a rank keeps no more than
    its part.
    """
    if plan.precision not in RECIPES:
        return
    wide = {id(inner) for module in model.modules() if _stays_bf16(module, plan) for inner in module.modules()}
    for module in model.modules():
        for matrix in _matrices(module) if id(module) not in wide else ():
            name = _recipe_name(matrix.part, plan)
            if name is None or any(side % RECIPES[name].alignment for side in matrix.weight.shape[-2:]):
                continue
            quantized = QuantizedWeight(
                name,
                is_input_first=matrix.is_input_first,
                keeps_input=matrix.input_of in plan.recompute,
                is_cached=plan.sharding != "full",
            )
            set_quantized(matrix.weight, quantized)


def _stays_bf16(module: nn.Module, plan: Plan) -> bool:
    """Whether the plan keeps a whole layer, or depth, out of low precision."""
    if isinstance(module, MtpLayer):
        return "mtp" in plan.bf16_modules
    if not isinstance(module, DecoderLayer) or module.layer >= plan.model.num_layers:
        return False
    return module.layer < plan.bf16_first_layers or module.layer >= plan.model.num_layers - plan.bf16_last_layers


def _recipe_name(part: Bf16Module | None, plan: Plan) -> PrecisionName | None:
    """The recipe of a matrix; None: bf16."""
    if part is None or part not in plan.bf16_modules:
        return plan.precision
    name = wide_precision(part, plan.precision)
    return name if name in RECIPES else None
