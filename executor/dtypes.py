"""Torch types of a plan's precision recipe: what is stored, multiplied and accumulated in which."""

from dataclasses import dataclass

import torch

from moeplan.plan import Plan
from moeplan.vocabulary import PRECISIONS

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Dtypes:
    """``param``: weights and activations; ``grad``: accumulated gradients; ``moment``: Adam's; ``main``: the update."""

    param: torch.dtype
    grad: torch.dtype
    moment: torch.dtype
    main: torch.dtype
    has_main_weights: bool


def plan_dtypes(plan: Plan) -> Dtypes:
    """Types of a plan that :func:`moeplan.executor.check.check_supported` accepts; fp64 keeps everything in fp64."""
    precision = PRECISIONS[plan.precision]
    param = TORCH_DTYPES.get(plan.precision, torch.bfloat16)  # what is quantized has a bf16 copy
    if param == torch.float64:
        return Dtypes(param, param, param, param, has_main_weights=False)
    grad, moment = TORCH_DTYPES[plan.grad_dtype], TORCH_DTYPES[plan.moment_dtype]
    return Dtypes(param, grad, moment, torch.float32, precision.has_main_weights)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The type sums over many elements are kept in."""
    return torch.promote_types(dtype, torch.float32)
