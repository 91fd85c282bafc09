"""Quantizing and back in plain torch, any device: the numbers of each recipe, bit for bit what is stored.

Shapes: ... leading dimensions, N elements along the sum (last), B blocks of them, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.kernels.recipes import LARGEST, Element, ScaleType, Scaling

DTYPES: dict[Element, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# Magnitudes of e2m1, whose code is their place here and the sign as fourth bit.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
SMALLEST = 1e-30  # a block of smaller numbers counts as zero: its scale would not be a normal fp32 number


@dataclass(frozen=True, slots=True)
class Quantized:
    """Numbers as stored, ``data`` [..., N] (e2m1: a code each in uint8), and what each is multiplied by on reading.

    ``scale`` is as stored too: [..., B] for blocks of ``scaling.block`` elements, else one number for all after the
    leading dimensions it has. ``tensor_scale`` is the one above blocks' scales in e4m3.
    """

    data: Tensor
    scale: Tensor
    tensor_scale: Tensor | None
    element: Element
    scaling: Scaling


def quantize(
    x_N: Tensor, element: Element, scaling: Scaling, *, is_weight: bool = False, amax: Tensor | None = None,
    stochastic: bool = False,
) -> Quantized:  # fmt: skip
    """Codes and scales of x along its last dimension; ``amax``, as :func:`block_amax` has it, instead of its own.

    The scale covers the largest magnitude, so nothing overflows unless ``amax`` is too small; then it is cut. A weight
    of three dimensions has a scale for each expert.
    """
    x_N = x_N.to(torch.float32)
    largest = LARGEST[element]
    if scaling.block is None:
        scale = _inverse(_tensor_amax(x_N, is_weight=is_weight) if amax is None else amax, largest)
        return Quantized(
            _stored(x_N * _above(scale, x_N), element, stochastic=False), 1 / scale, None, element, scaling
        )
    blocks_BN = _blocks(x_N, scaling.block)
    if amax is not None:
        amax_B = amax.repeat_interleave(scaling.weight_rows, -2)[..., : x_N.shape[-2], :]
    else:
        amax_B = blocks_BN.abs().amax(-1)
        if is_weight and scaling.weight_rows > 1:
            amax_B = _amax_of_rows(amax_B, scaling.weight_rows)
    if scaling.scale == "fp32":
        inverse_B = _inverse(amax_B, largest)
        data = _stored(blocks_BN * inverse_B[..., None], element, stochastic=stochastic)
        return Quantized(data.flatten(-2)[..., : x_N.shape[-1]], 1 / inverse_B, None, element, scaling)
    tensor_scale = None
    if scaling.scale == "e4m3":
        whole = _tensor_amax(x_N, is_weight=is_weight)
        tensor_scale = 1 / _inverse(whole, largest * LARGEST["e4m3"])
        amax_B = amax_B / _above(tensor_scale, amax_B)
    stored_B = _stored_scale(amax_B, largest, scaling.scale)
    factor_B = _read_scale(stored_B, tensor_scale)
    cut_BN = torch.where(factor_B[..., None] > 0, blocks_BN / factor_B[..., None].clamp(min=SMALLEST), 0.0)
    data = _stored(cut_BN, element, stochastic=stochastic).flatten(-2)[..., : x_N.shape[-1]]
    return Quantized(data, stored_B, tensor_scale, element, scaling)


def block_amax(weight_EAB: Tensor, scaling: Scaling) -> Tensor:
    """Largest magnitudes of each expert [E], or of its blocks [E, A / rows, B / block]."""
    if scaling.block is None:
        return weight_EAB.abs().amax((1, 2))
    amax_B = _blocks(weight_EAB, scaling.block).abs().amax(-1)
    return _blocks(amax_B.transpose(1, 2), scaling.weight_rows).amax(-1).transpose(1, 2)


def scale_of(amax: Tensor, element: Element) -> Tensor:
    """The fp32 scale that covers ``amax``."""
    return 1 / _inverse(amax, LARGEST[element])


def dequantize(q: Quantized) -> Tensor:
    """The numbers that are stored, in fp32."""
    values_N = _values(q.data, q.element)
    if q.scaling.block is None:
        return values_N * _above(q.scale, values_N)
    factor_B = _read_scale(q.scale, q.tensor_scale)
    blocks_BN = _blocks(values_N, q.scaling.block)
    return (blocks_BN * factor_B[..., None]).flatten(-2)[..., : values_N.shape[-1]]


def hadamard(x_N: Tensor, width: int) -> Tensor:
    """Product of x and an orthogonal matrix of ``width`` along its padded last dimension, the same in every call.

    Signs of the rows are drawn once, from a fixed seed; a product of two tensors summed over this dimension stays.
    """
    matrix = _hadamard_matrix(width).to(x_N.device)
    return (_blocks(x_N.to(torch.float32), width) @ matrix).flatten(-2)


def _hadamard_matrix(width: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(2, (width, 1), generator=torch.Generator().manual_seed(0)) * 2 - 1
    rotation: Tensor = signs * matrix / width**0.5
    return rotation


def _blocks(x_N: Tensor, width: int) -> Tensor:
    """[..., N] as [..., B, width], the last block filled with zeros."""
    missing = -x_N.shape[-1] % width
    padded: Tensor = F.pad(x_N, (0, missing)).unflatten(-1, (-1, width))
    return padded


def _tensor_amax(x_N: Tensor, *, is_weight: bool) -> Tensor:
    if not x_N.numel():
        return x_N.new_zeros(())
    return x_N.abs().amax((-2, -1)) if is_weight and x_N.dim() == 3 else x_N.abs().amax()


def _amax_of_rows(amax_B: Tensor, rows: int) -> Tensor:
    """Each block's amax over ``rows`` neighbours in the dimension before: blocks of two dimensions."""
    count = amax_B.shape[-2]
    grouped = _blocks(amax_B.transpose(-1, -2), rows).amax(-1)
    return grouped.repeat_interleave(rows, -1)[..., :count].transpose(-1, -2)


def _inverse(amax: Tensor, largest: float) -> Tensor:
    """What numbers are multiplied by before they are stored; 1 where all are zero.

    A number over a tensor would be its reciprocal times the number: one rounding too many, which moves ties.
    """
    return torch.where(amax > SMALLEST, torch.full_like(amax, largest) / amax.clamp(min=SMALLEST), 1.0)


def _above(scale: Tensor, x: Tensor) -> Tensor:
    """A scale of leading dimensions with as many dimensions as what it scales."""
    return scale.reshape(*scale.shape, *(1,) * (x.dim() - scale.dim()))


def _stored_scale(amax_B: Tensor, largest: float, kind: ScaleType) -> Tensor:
    if kind == "e4m3":
        return (amax_B / largest).clamp(max=LARGEST["e4m3"]).to(torch.float8_e4m3fn)
    # The power of two that covers amax, of which e8m0 keeps the exponent plus 127. By its bits: a logarithm in fp32
    # rounds what lies just above a power of two down to it.
    half, exponent = torch.frexp((amax_B / torch.full_like(amax_B, largest)).clamp(min=2.0**-126))
    byte = torch.where(amax_B > 0, exponent - (half == 0.5).to(exponent.dtype), 0) + 127
    return byte.to(torch.uint8).view(torch.float8_e8m0fnu)


def _read_scale(stored_B: Tensor, tensor_scale: Tensor | None) -> Tensor:
    factor_B = stored_B.to(torch.float32)
    return factor_B if tensor_scale is None else factor_B * _above(tensor_scale, factor_B)


def _stored(x: Tensor, element: Element, *, stochastic: bool) -> Tensor:
    x = x.clamp(-LARGEST[element], LARGEST[element])
    if element != "e2m1":
        return x.to(DTYPES[element])
    magnitude = x.abs().contiguous()
    if stochastic:
        values = magnitude.new_tensor(E2M1_VALUES)
        below = (torch.bucketize(magnitude, values, right=True) - 1).clamp(max=len(E2M1_VALUES) - 2)
        step = values[below + 1] - values[below]
        code = below + (torch.rand_like(magnitude) * step < magnitude - values[below]).to(below.dtype)
    else:
        middles = magnitude.new_tensor(_E2M1_MIDDLES)
        code = torch.bucketize(magnitude, middles)
        # Halfway goes to the even code.
        upper = code.clamp(max=len(_E2M1_MIDDLES) - 1)
        code = code + ((magnitude == middles[upper]) & (code % 2 == 1)).to(code.dtype)
    return (code + 8 * (x < 0)).to(torch.uint8)


def _values(data: Tensor, element: Element) -> Tensor:
    if element != "e2m1":
        return data.to(torch.float32)
    magnitude = torch.tensor(E2M1_VALUES, device=data.device)[(data % 8).long()]
    return torch.where(data >= 8, -magnitude, magnitude)


def packed(codes_N: Tensor) -> Tensor:
    """Two codes of e2m1 a byte, the first in the lower half, as ``torch.float4_e2m1fn_x2`` has them; N must be even."""
    return (codes_N[..., ::2] + 16 * codes_N[..., 1::2]).view(torch.float4_e2m1fn_x2)
