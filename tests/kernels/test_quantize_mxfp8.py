"""MXFP8 in one pass under Triton's interpreter: data and scales of the reference, bit by bit."""

import pytest
import torch
from torch import Tensor

from moeplan.kernels import quantize_mxfp8_triton as fused
from moeplan.kernels import quantized_gemm_blackwell as backend
from moeplan.kernels.padded_rows import TILE, dense_rows, padded_rows
from moeplan.kernels.quantized_gemm import Stored
from moeplan.kernels.recipes import RECIPES
from tests.kernels.fp8_interpreter import exact_fp8

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_quantized_on_gpu.py")
RECIPE = RECIPES["mxfp8"]


def _numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.logspace(-20, 20, shape[-1])
    x[..., 3, :] = 0.0
    x[..., 0, 0] = 448 * 2.0**70  # covered by a power of two itself; the next one is just above
    x[..., 1, 0] = 448 * 2.0**70 * (1 + 2**-7)
    return x.bfloat16()


def _assert_same(got: Stored, expected: Stored) -> None:
    for one, other in zip(got[:2], expected[:2], strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("width", [32, 160])
@pytest.mark.parametrize("counts", [[70, 0, 200, 3], [200]], ids=["experts", "dense"])
def test_rows_are_the_references(counts: list[int], width: int) -> None:
    ends = torch.tensor(counts).cumsum(0).int()
    rows = padded_rows(ends, sum(counts)) if len(counts) > 1 else dense_rows(counts[0], ends.device)
    x_RC = _numbers(sum(counts), width)
    with exact_fp8():
        got = fused.quantize_rows(x_RC, rows)
    expected = backend.quantize_rows(x_RC, rows, RECIPE, is_gradient=False)
    used = int(rows.padded_end_E[-1])
    for one, other in zip(got.as_is[:2], expected.as_is[:2], strict=True):
        assert torch.equal(one.view(torch.uint8)[:used], other.view(torch.uint8)[:used])
    assert torch.equal(got.turned[0].view(torch.uint8)[:, :used], expected.turned[0].view(torch.uint8)[:, :used])
    num_scales = -(-width // TILE) * TILE * used // 32
    scales = [one.view(torch.uint8).flatten()[:num_scales] for one in (got.turned[1], expected.turned[1])]
    assert torch.equal(*scales)
    assert [one.shape for one in (*got.as_is[:2], *got.turned[:2])] == [
        one.shape for one in (*expected.as_is[:2], *expected.turned[:2])
    ]


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("shape", [(2, 160, 96), (1, 128, 256)])
def test_weights_are_the_references(shape: tuple[int, int, int], is_wide: bool) -> None:
    weight_EAB = _numbers(*shape)
    if is_wide:  # numbers that bf16 does not hold
        weight_EAB = weight_EAB.float() * 1.001
    with exact_fp8():
        got = fused.quantize_weights(weight_EAB)
    expected = backend.quantize_weights(weight_EAB, RECIPE)
    _assert_same(got.as_is, expected.as_is)
    _assert_same(got.turned, expected.turned)


def test_what_is_no_number_stays_none() -> None:
    x_RC = torch.ones(130, 32).bfloat16()
    x_RC[5, 6] = float("nan")
    with exact_fp8():
        pair = fused.quantize_rows(x_RC, dense_rows(130, x_RC.device))
    assert pair.as_is[0].float().isnan().sum() == pair.turned[0].float().isnan().sum() == 1


def test_no_rows_are_nothing() -> None:
    pair = fused.quantize_rows(torch.zeros(0, 64).bfloat16(), dense_rows(0, torch.device("cpu")))
    assert pair.as_is[0].shape == (0, 64)
    assert pair.turned[0].shape == (64, 0)
