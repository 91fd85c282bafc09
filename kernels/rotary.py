"""Rotary position embedding, halves rotated against each other (GPT-NeoX order).

Shapes: B batch, L positions, N heads, D rotated width of a head.
"""

import torch
from torch import Tensor


def rotary_tables(
    positions_L: Tensor, width: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Tables cos and sin, each [L, D/2], of position / theta**(2i/D); angles in fp64 (fp32 blurs far ones)."""
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=positions_L.device) / width
    angle = positions_L.to(torch.float64)[:, None] / theta**exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rotary(x_BLND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i < D/2 of x against channel i + D/2 by the angle of its position; dtype of x.

    ``cos`` and ``sin`` [L, D/2] come from :func:`rotary_tables`; backward keeps nothing else.
    """
    if x_BLND.is_cuda:
        from moeplan.kernels import rotary_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

        return rotary_triton.apply_rotary(x_BLND, cos, sin)
    first, second = x_BLND.chunk(2, -1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return rotated.to(x_BLND.dtype)
