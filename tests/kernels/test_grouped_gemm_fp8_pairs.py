"""Weight gradients of two micro-batches in one visit of a tile, under Triton's interpreter, against sums in float64.

Operands are FP8 already, with scales that real micro-batches may have, or could only by accident.

Shapes: P padded rows, E experts, M and N sides of a weight gradient.
"""

import math
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moeplan.kernels.grouped_gemm_fp8_triton import gradient_gemm_
from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.padded_rows import PaddedRows, padded_rows
from moeplan.kernels.quantized_gemm import QuantizedOperands, Stored
from moeplan.kernels.weight_grad_pairs import Pairs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_quantized_on_gpu.py")

M, N = 144, 272  # a tile is 128 x 256 or 128 x 128
WAYS: dict[str, dict[str, Any]] = {"one level": {}, "two levels": {"split": True}, "blocks": {"blockwise": True}}
COUNTS = {
    "ragged": ([70, 0, 130, 3], [0, 140, 5, 0]),
    "the first has no rows": ([0, 0, 0, 0], [1, 0, 200, 0]),
    "the second has no rows": ([1, 0, 200, 0], [0, 0, 0, 0]),
    "neither has": ([0, 0], [0, 0]),
    "one expert": ([130], [250]),
}


def _rows(counts: list[int]) -> PaddedRows:
    return padded_rows(torch.tensor(counts).cumsum(0).int(), sum(counts))


def _numbers(rows: PaddedRows, width: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """[width, P]; padding is zero, as quantizing leaves it."""
    numbers = torch.randn(width, rows.num_padded, generator=generator)
    return numbers.masked_fill_(rows.source_P == rows.num_rows, 0.0).to(dtype)


def _part(
    counts: list[int], seed: int, scales: tuple[float, float] = (0.5, 0.25), *, blockwise: bool = False
) -> QuantizedOperands:
    generator, rows = torch.Generator().manual_seed(seed), _rows(counts)
    sides = zip((M, N), (torch.float8_e4m3fn, torch.float8_e5m2), scales, strict=True)
    stored: list[Stored] = []
    for width, dtype, scale in sides:
        if blockwise:
            scales_BC = scale * (0.5 + torch.rand(rows.num_tiles, width, generator=generator))
            stored.append((_numbers(rows, width, torch.float8_e4m3fn, generator), scales_BC, None))
        else:
            stored.append((_numbers(rows, width, dtype, generator), torch.tensor(scale), None))
    return QuantizedOperands(stored[0], stored[1], rows)


def _exact(part: QuantizedOperands) -> Tensor:
    """[E, M, N]."""
    a_MP, b_NP = (
        data.double() * (scale.double().repeat_interleave(128, 0).t() if scale.dim() else scale.double())
        for data, scale, _ in (part.a, part.b)
    )
    ends = [0, *part.rows.padded_end_E.tolist()]
    return torch.stack([a_MP[:, start:end] @ b_NP[:, start:end].t() for start, end in pairwise(ends)])


def _check(got_EMN: Tensor, expected_EMN: Tensor) -> None:
    """By expert, so that a small one does not hide behind a large one."""
    assert got_EMN.isfinite().all()
    for got, expected in zip(got_EMN.double(), expected_EMN, strict=True):
        assert float((got - expected).norm()) <= 2e-6 * float(expected.norm())


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", COUNTS)
def test_both_parts_are_summed(case: str, way: str, add: bool) -> None:
    blockwise = way == "blocks"
    parts = [_part(counts, seed, (0.5, 2.0**-seed), blockwise=blockwise) for seed, counts in enumerate(COUNTS[case])]
    before = torch.full((len(COUNTS[case][0]), M, N), 1.0 if add else math.nan)
    total = before.clone()
    gradient_gemm_(total, parts, add=add, **WAYS[way])
    expected = _exact(parts[0]) + _exact(parts[1])
    _check(total, expected + before if add else expected)


@pytest.mark.parametrize("way", WAYS)
def test_two_parts_of_one_scale_are_one_part_as_long_as_both(way: str) -> None:
    parts = [_part([128], seed, blockwise=way == "blocks") for seed in range(2)]
    sides: list[Stored] = []
    for first, second in zip(parts[0][:2], parts[1][:2], strict=True):
        scale = torch.cat([first[1], second[1]]) if way == "blocks" else first[1]
        sides.append((torch.cat([first[0], second[0]], 1), scale, None))
    together, one = torch.zeros(1, M, N), torch.zeros(1, M, N)
    gradient_gemm_(together, parts, **WAYS[way])
    gradient_gemm_(one, [QuantizedOperands(sides[0], sides[1], _rows([256]))], **WAYS[way])
    assert torch.equal(together, one)


SCALES = {
    "equal": ((1e-2, 1e-7), (1e-2, 1e-7)),
    "the second far smaller": ((1e-2, 1e-4), (1e-2, 1e-21)),
    "the first far smaller": ((1e-2, 1e-21), (1e-2, 1e-4)),
    "the second too small to be seen": ((1e10, 1e10), (1e-10, 1e-10)),
    "the first too small to be seen": ((1e-10, 1e-10), (1e10, 1e10)),
    "the second underflows": ((1e-2, 1e-4), (1e-33, 1e-35)),
    "the first underflows": ((1e-33, 1e-35), (1e-2, 1e-4)),
    "both underflow": ((1e-33, 1e-35), (1e-33, 1e-35)),
    "the first as small as normal numbers": ((1e-19, 2e-19), (1e-19, 3e-19)),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the GPU divides by zero in silence
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("case", SCALES)
def test_scales_may_be_as_different_as_can_be(case: str, split: bool) -> None:
    counts = ([70, 0, 130, 3], [5, 0, 130, 3])  # an expert of one part alone could show what the other hides
    first, second = (_part(*one) for one in zip(counts, range(2), SCALES[case], strict=True))
    total = torch.zeros(4, M, N)
    gradient_gemm_(total, [first, second], split=split)
    apart = torch.zeros_like(total)
    for part in (first, second):
        gradient_gemm_(apart, [part], split=split)
    _check(total, apart.double())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("zeros", [0, 1])
@pytest.mark.parametrize("scale", [1e-2, 1e-15, 1e-20])
def test_a_part_of_zeros_whose_scale_is_one_changes_nothing(zeros: int, scale: float) -> None:
    parts = [_part([70, 0, 3], 0, (1e-2, scale)), _part([5, 6, 0], 1, (1e-2, 1.0))]
    (b_NP, one, _), rows = parts[1].b, parts[1].rows
    parts[1] = QuantizedOperands(parts[1].a, (torch.zeros_like(b_NP), one, None), rows)
    total = torch.zeros(3, M, N)
    gradient_gemm_(total, parts[::-1] if zeros == 0 else parts)
    _check(total, _exact(parts[0]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_what_is_not_finite_is_not_hidden(bad: int, scale: float) -> None:
    parts = [_part([70], seed, (1.0, scale if seed == bad else 1.0)) for seed in range(2)]
    total = torch.zeros(1, M, N)
    gradient_gemm_(total, parts)
    assert not total.isfinite().any()


def test_a_third_part_is_refused() -> None:
    with pytest.raises(ValueError, match="parts: got 3, allowed: at most 2"):
        gradient_gemm_(torch.zeros(1, M, N), [_part([1], 0)] * 3)


def test_operands_wait_as_they_are() -> None:
    main = MainGrad(torch.zeros(2, M, N), pairs=Pairs(2))
    assert main.pairs is not None
    first, second = _part([70, 3], 0), _part([1, 1], 1)
    data = weakref.ref(first.a[0])
    assert main.pairs.take(first) == ()
    assert main.pairs.waiting_bytes == first.nbytes == (M + N) * 256 + 2 * 4
    parts = main.pairs.take(second)
    assert parts[0] is first
    assert parts[1] is second
    assert main.pairs.waiting_bytes == 0
    del first, parts
    assert data() is None
