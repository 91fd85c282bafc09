"""Causal attention by FlashAttention-4 on Hopper (package flash-attn-4, the extra ``hopper``).

One H200, 4 x 4096, 32 heads of 128 over 4 of keys and values, ms: forward 0.98 (cuDNN 1.05), backward 2.76 (3.11),
the latter with 0.82 of cuDNN's energy, which is what counts at the power limit. Backward adds by atomics: two runs may
differ in rounding.

Shapes: B sequences of S tokens, N query heads over M key-value heads, D width of a head.
"""

import torch
from torch import Tensor

from moeplan.kernels.back_end_choice import Shape
from moeplan.kernels.optional_package import version_in_series

OPERATION = "attention"
NAME = "flash_attn_4"
PACKAGE = "flash-attn-4"
_SERIES = "4."
_MOST_WIDE = 128  # heads, as tested here; the package takes 256


def installed_version() -> str | None:
    """Of the package, where these calls fit it."""
    return version_in_series(PACKAGE, _SERIES)


def takes(q_BSND: Tensor, v_BSMD: Tensor) -> bool:
    """Whether the package is here, and heads are what was tested: bf16 on Hopper, of one width of whole 16 bytes."""
    width = q_BSND.shape[3]
    return (
        installed_version() is not None
        and q_BSND.is_cuda
        and q_BSND.dtype == torch.bfloat16
        and width == v_BSMD.shape[3]
        and width % 8 == 0
        and width <= _MOST_WIDE
        and torch.cuda.get_device_capability(q_BSND.device)[0] == 9
    )


def shape_of(q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor) -> Shape:
    """What a choice of back end holds for: heads of queries and of keys, and widths of keys and values."""
    return q_BSND.shape[2], k_BSMD.shape[2], q_BSND.shape[3], v_BSMD.shape[3]


def attend(q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor) -> Tensor:
    """Causal attention out_BSND at a scale of D ** -0.5, with gradients."""
    from flash_attn.cute import flash_attn_func  # noqa: PLC0415 - an optional package, and a compiler

    out_BSND: Tensor = flash_attn_func(q_BSND, k_BSMD, v_BSMD, causal=True)[0]
    return out_BSND
