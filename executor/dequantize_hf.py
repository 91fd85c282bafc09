"""Quantized tensors of published checkpoints, read slice by slice as if they were not: FP8 in blocks, and MXFP4.

Shapes: E experts, O output width, I input width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moeplan.hf_folder import MXFP4_BLOCK
from moeplan.kernels.quantize_reference import E2M1_VALUES


class BlockFp8Slices:
    """A matrix of FP8 values, each times the factor of its block of ``block`` rows and columns (DeepSeek-V3)."""

    def __init__(self, values_OI: Any, factors: Any, block: Sequence[int]) -> None:
        self._values, self._factors, self._block = values_OI, factors, block

    def __getitem__(self, ranges: tuple[slice, slice]) -> Tensor:
        blocks = [torch.arange(one.start, one.stop) // size for one, size in zip(ranges, self._block, strict=True)]
        rows, columns = blocks
        factors: Tensor = self._factors[tuple(slice(int(one[0]), int(one[-1]) + 1) for one in blocks)]
        values: Tensor = self._values[ranges]
        return values.float() * factors.float()[rows - rows[0]][:, columns - columns[0]]


class Mxfp4Slices:
    """Matrices [E, I, O] stored [E, O, I / 32, 16]: two values of 4 bits a byte, low one first, an exponent a block.

    OCP MX (E2M1 values, E8M0 scales), as GPT-OSS is published.
    """

    def __init__(self, blocks: Any, exponents: Any) -> None:
        self._blocks, self._exponents = blocks, exponents

    def __getitem__(self, ranges: tuple[slice, slice, slice]) -> Tensor:
        experts, inputs, outputs = ranges
        first = inputs.start // MXFP4_BLOCK
        blocks = slice(first, -(-inputs.stop // MXFP4_BLOCK))
        bytes_EOBC: Tensor = self._blocks[experts, outputs, blocks, 0 : MXFP4_BLOCK // 2]
        exponents_EOB: Tensor = self._exponents[experts, outputs, blocks]
        codes = torch.stack([bytes_EOBC & 15, bytes_EOBC >> 4], -1).flatten(-2).long()
        values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])[codes]
        whole_EOI = torch.ldexp(values, exponents_EOB[..., None].int() - 127).flatten(-2)
        start = first * MXFP4_BLOCK
        return whole_EOI[..., inputs.start - start : inputs.stop - start].transpose(1, 2)
