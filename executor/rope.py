"""Rotary tables of a model: its frequencies, as its rope scaling changes them.

Shapes: L positions, D rotated width of a head.
"""

import math

import torch
from torch import Tensor

from moeplan.kernels.rotary import rotary_frequencies, tables_of
from moeplan.model_spec import Llama3Scaling, ModelSpec, YarnScaling


def model_rotary_tables(model: ModelSpec, positions_L: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables cos and sin, each [L, D/2], for heads of which ``width`` channels are rotated."""
    frequencies = rotary_frequencies(width, model.rope_theta, positions_L.device)
    scaling = model.rope_scaling
    if isinstance(scaling, YarnScaling):
        frequencies = _yarn(frequencies, width, model.rope_theta, scaling)
        return tables_of(positions_L, frequencies, dtype, scaling.table_factor)
    if isinstance(scaling, Llama3Scaling):
        frequencies = _llama3(frequencies, scaling)
    return tables_of(positions_L, frequencies, dtype)


def _yarn(frequencies: Tensor, width: int, theta: float, scaling: YarnScaling) -> Tensor:
    """Divided by the factor where a channel turns less than ``beta_slow`` times over the original length (YaRN)."""

    def channel(num_turns: float) -> float:
        return width * math.log(scaling.original_max_positions / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # as published: a ramp of no width would divide by zero
    channels = torch.arange(width // 2, dtype=torch.float64, device=frequencies.device)
    interpolated = ((channels - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * interpolated + frequencies * (1 - interpolated)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divided by the factor beyond the longest wavelength that is kept, with a ramp in between (Llama 3.1)."""
    num_turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((num_turns - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept
