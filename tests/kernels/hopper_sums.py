"""How Hopper's tensor cores add FP8 products, in float64: an accumulator of 14 bits.

Of 32 products and the sum so far each is shifted to the largest exponent among them and keeps 13 bits below its leading
one; what is beyond is cut off (DeepSeek-V3 technical report, sections 3.3.2 and 3.5.2). CPUs and Triton's interpreter
add in fp32, so this stands for the GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BITS_BELOW = 13
STEP = 32  # products that one instruction adds at once


def add_products(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """``total`` + a @ b as one accumulator of the tensor cores has it, float64."""
    total_MN = total_MN.double()
    for a_MS, b_SN in zip(a_MK.double().split(STEP, 1), b_KN.double().split(STEP, 0), strict=True):
        addends_SMN = torch.cat([total_MN[None], a_MS.t()[:, :, None] * b_SN[:, None, :]])
        _, exponent_MN = torch.frexp(addends_SMN.abs().amax(0))
        quantum_MN = torch.ldexp(torch.ones_like(total_MN), exponent_MN - 1 - BITS_BELOW)
        total_MN = ((addends_SMN / quantum_MN).trunc() * quantum_MN).sum(0)
    return total_MN


def matmul(a_MK: Tensor, b_KN: Tensor, promote_every: int | None) -> Tensor:
    """Product of both, partial sums added in fp32 every so many elements; None: never."""
    width = a_MK.shape[1] if promote_every is None else promote_every
    total_MN = torch.zeros(len(a_MK), b_KN.shape[1])
    for a_MP, b_PN in zip(a_MK.split(width, 1), b_KN.split(width, 0), strict=True):
        total_MN += add_products(torch.zeros_like(total_MN), a_MP, b_PN).float()
    return total_MN


@contextmanager
def hopper_dots() -> Iterator[None]:
    """Kernels interpreted inside multiply FP8 as Hopper does."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def dot(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        a_MK, b_KN = (_values(one) for one in (a, b))
        added = add_products(torch.from_numpy(total.data), a_MK, b_KN).float()
        return interpreter.TensorHandle(added.numpy(), total.dtype.scalar)

    builder.create_dot = dot
    try:
        yield
    finally:
        builder.create_dot = original


def _values(handle: Any) -> Tensor:
    dtype = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}[str(handle.dtype.scalar)]
    return torch.from_numpy(handle.data.copy()).view(dtype).float()
