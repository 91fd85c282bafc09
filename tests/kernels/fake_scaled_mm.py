"""``scaled_mm`` and ``scaled_grouped_mm`` of torch.nn.functional for Blackwell's formats, on any device.

They read operands as the documentation of cuBLAS and torch's tests have them, one element at a time, and refuse what
torch's own checks refuse. What a kernel leaves unwritten (groups and rows that no expert has) is NaN.

Shapes: R rows, K summed width, G groups, M and N of a product.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_torch_scaled_mm = F.scaled_mm


def untiled(flat: Tensor, num_rows: int, num_blocks: int) -> Tensor:
    """The scale [R, B] of each row and block, by the formula of cuBLAS's documentation."""
    row, block = torch.arange(num_rows)[:, None], torch.arange(num_blocks)
    tiles_a_row = -(-num_blocks // 4)
    tile = row // 128 * tiles_a_row + block // 4
    return flat.flatten()[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def numbers(data_RK: Tensor) -> Tensor:
    """What is stored before scaling, fp32."""
    if data_RK.dtype != torch.float4_e2m1fn_x2:
        return data_RK.float()
    codes = data_RK.contiguous().view(torch.uint8)
    both = torch.stack([codes % 16, codes // 16], -1).flatten(-2).long()
    return E2M1[both % 8] * torch.where(both >= 8, -1.0, 1.0)


def read(data_RK: Tensor, flat: Tensor, above: Tensor | None) -> Tensor:
    """The matrix [R, K] in fp32."""
    values_RK = numbers(data_RK)
    block = 32 if flat.dtype == torch.float8_e8m0fnu else 16
    scale_RB = untiled(flat.view(torch.uint8), len(values_RK), values_RK.shape[1] // block).view(flat.dtype).float()
    if above is not None:
        scale_RB = scale_RB * above
    return values_RK * scale_RB.repeat_interleave(block, 1)


def read_2d(data_RK: Tensor, scale: Tensor, above: Tensor | None, offs: list[int], *, is_along_rows: bool) -> Tensor:
    """A matrix [R, K] whose groups along rows, or along K, have their scales in pieces that follow one another."""
    is_packed = data_RK.dtype == torch.float4_e2m1fn_x2
    block, flat = (32 if scale.dtype == torch.float8_e8m0fnu else 16), scale.flatten()
    num_rows, width = data_RK.shape[0], data_RK.shape[1] * (2 if is_packed else 1)
    out_RK, used = torch.full((num_rows, width), float("nan")), 0
    for group, (start, end) in enumerate(pairwise([0, *offs])):
        rows, cols = (slice(start, end), slice(0, width)) if is_along_rows else (slice(0, num_rows), slice(start, end))
        stored = slice(cols.start // 2, cols.stop // 2) if is_packed else cols
        size = _up(rows.stop - rows.start, 128) * _up((cols.stop - cols.start) // block, 4)
        part = data_RK.view(torch.uint8)[rows, stored].view(data_RK.dtype)
        own = None if above is None else above[group]
        out_RK[rows, cols] = read(part, flat[used : used + size], own)
        used += size
    assert used <= flat.numel()
    return out_RK


def scaled_mm(  # noqa: PLR0917 - as torch has it
    mat_a: Tensor, mat_b: Tensor, scale_a: list[Tensor], recipe_a: list[Any], scale_b: list[Tensor],
    recipe_b: list[Any], swizzle_a: Any, swizzle_b: Any, *, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """As torch's, which checks shapes and types first."""
    scales = [[scale.to("meta") for scale in one] for one in (scale_a, scale_b)]
    like = _torch_scaled_mm(
        mat_a.to("meta"), mat_b.to("meta"), scales[0], recipe_a, scales[1], recipe_b, swizzle_a, swizzle_b,
        output_dtype=output_dtype,
    )  # fmt: skip
    a_MK, b_NK = (read(x, *_both(scale)) for x, scale in ((mat_a, scale_a), (mat_b.t(), scale_b)))
    product_MN = (a_MK @ b_NK.t()).to(output_dtype)
    assert product_MN.shape == like.shape
    return product_MN


def _both(scale: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    return scale[0], scale[1] if len(scale) == 2 else None


def _check_grouped(mat_a: Tensor, mat_b: Tensor, scale_a: list[Tensor], scale_b: list[Tensor], offs: Tensor) -> None:
    """Checks of torch 2.11 to 2.13 (GroupedBlas.cpp) and of the library under it."""
    assert offs.dtype == torch.int32
    assert offs.dim() == 1
    assert mat_a.dim() == 2
    assert mat_a.is_contiguous()
    assert mat_b.transpose(-2, -1).is_contiguous()
    assert mat_a.shape[-1] % 16 == mat_b.shape[-2] % 16 == mat_b.shape[-1] % 16 == 0
    assert all(scale.is_contiguous() for scale in (*scale_a, *scale_b))
    is_packed = mat_a.dtype == torch.float4_e2m1fn_x2
    block = 16 if is_packed else 32
    for above in (*scale_a[1:], *scale_b[1:]):
        assert (above.dtype, above.shape) == (torch.float32, offs.shape)
    assert scale_a[0].dim() == 2
    assert len(scale_a[0]) >= len(mat_a)
    if mat_b.dim() == 2:
        assert scale_b[0].dim() == 2
        assert len(scale_b[0]) >= mat_b.shape[1]
        return
    assert mat_a.shape[1] == mat_b.shape[1]
    width = mat_b.shape[1] * (2 if is_packed else 1)
    assert scale_b[0].shape == (len(offs), _up(width // block, 4) * _up(mat_b.shape[2], 128))


def scaled_grouped_mm(  # noqa: PLR0917 - as torch has it
    mat_a: Tensor, mat_b: Tensor, scale_a: list[Tensor], recipe_a: list[Any], scale_b: list[Tensor],
    recipe_b: list[Any], swizzle_a: Any, swizzle_b: Any, *, offs: Tensor, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """As torch's: [P, K] times [G, K, N], or [M, P] times [P, N], groups of P ending at ``offs``."""
    _check_grouped(mat_a, mat_b, scale_a, scale_b, offs)
    assert output_dtype == torch.bfloat16
    assert recipe_a == recipe_b
    assert swizzle_a == swizzle_b == F.SwizzleType.SWIZZLE_32_4_4
    ends, is_2d = offs.tolist(), mat_b.dim() == 2
    a_MK = read_2d(mat_a, *_both(scale_a), ends, is_along_rows=not is_2d)
    nan = float("nan")
    if is_2d:
        b_NK = read_2d(mat_b.t(), *_both(scale_b), ends, is_along_rows=False)
        out = torch.full((len(ends), len(a_MK), len(b_NK)), nan)
    else:
        out = torch.full((len(a_MK), mat_b.shape[2]), nan)
    for group, (start, end) in enumerate(pairwise([0, *ends])):
        if start == end:
            continue
        if is_2d:
            out[group] = a_MK[:, start:end] @ b_NK[:, start:end].t()
        else:
            above = scale_b[1][group] if len(scale_b) == 2 else None
            weight_NK = mat_b.transpose(1, 2).view(torch.uint8)[group].view(mat_b.dtype)
            out[start:end] = a_MK[start:end] @ read(weight_NK, scale_b[0][group], above).t()
    return out.to(output_dtype)


@contextmanager
def fake_kernels() -> Iterator[set[str]]:
    """Both in place of torch's; the names of those that were called."""
    calls: set[str] = set()

    def counted(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any, **options: Any) -> Tensor:
            calls.add(kernel.__name__)
            return kernel(*arguments, **options)

        return call

    with (
        mock.patch.object(F, "scaled_mm", counted(scaled_mm)),
        mock.patch.object(F, "scaled_grouped_mm", counted(scaled_grouped_mm)),
    ):
        yield calls
