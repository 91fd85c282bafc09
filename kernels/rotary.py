"""Rotary position embedding, halves rotated against each other (GPT-NeoX order).

Shapes: B batch, L positions, N heads, D rotated width of a head.
"""

import torch
from torch import Tensor


def rotary_tables(
    positions_L: Tensor, width: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Tables cos and sin, each [L, D/2], of position / theta**(2i/D)."""
    return tables_of(positions_L, rotary_frequencies(width, theta, positions_L.device), dtype)


def rotary_frequencies(width: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Radians a position [D/2] of each pair of channels, theta**(-2i/D) in fp64."""
    return theta ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)


def tables_of(
    positions_L: Tensor, frequencies: Tensor, dtype: torch.dtype = torch.float32, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Tables cos and sin, each [L, D/2], times ``factor``; angles in fp64 (fp32 blurs far ones)."""
    angle = positions_L.to(torch.float64)[:, None] * frequencies
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


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
