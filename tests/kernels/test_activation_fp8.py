"""Activations that leave FP8, under Triton's interpreter: to the bit the activation in bf16, quantized afterwards."""

import pytest
import torch
from torch import Tensor

from moeplan.executor.quantized_experts import KINDS
from moeplan.kernels.activation import ActivationKind, activation
from moeplan.kernels.activation_fp8_triton import Tiling, activate, activate_backward
from moeplan.kernels.padded_rows import PaddedRows, padded_rows
from moeplan.kernels.quantize_triton import amax, quantize_rows
from moeplan.kernels.quantized_gemm import Pair
from tests.kernels.fp8_interpreter import exact_fp8

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_quantized_on_gpu.py")

COUNTS = [70, 0, 130, 3]
TILINGS = (Tiling(128, 8, columns_first=False), Tiling(64, 4), Tiling(256, 16, columns_first=False))


def _rows(counts: list[int]) -> PaddedRows:
    return padded_rows(torch.tensor(counts).cumsum(0).int(), sum(counts))


def _operands(kind: str, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    widths = (width * (2 if kind in {"swiglu", "geglu"} else 1), width)
    x_RG, grad_RF = (torch.randn(sum(COUNTS), one, generator=generator).bfloat16() for one in widths)
    x_RG[100, 7] = 60.0  # the largest by far, in a row of its own probability
    return x_RG, grad_RF, torch.rand(sum(COUNTS), generator=generator)


def _quantized(x: Tensor, rows: PaddedRows, dtype: torch.dtype, *, blockwise: bool) -> Pair:
    return quantize_rows(x, rows, dtype, None if blockwise else amax(x))


def _assert_same(got: Pair, expected: Pair, rows: PaddedRows) -> None:
    used = int(rows.padded_end_E[-1])
    for one, other, dim in ((got.as_is, expected.as_is, 0), (got.turned, expected.turned, 1)):
        assert one[0].dtype == other[0].dtype
        assert torch.equal(*(data.view(torch.uint8).narrow(dim, 0, used) for data in (one[0], other[0])))
        if not one[1].dim():
            assert torch.equal(one[1], other[1])
        elif dim:
            assert torch.equal(one[1][: used // 128], other[1][: used // 128])
        else:
            assert torch.equal(one[1][:, :used], other[1][:, :used])


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize("kind, has_probs", [("swiglu", True), ("swiglu", False), ("gelu", True)])
def test_bytes_are_those_of_an_activation_quantized_afterwards(
    kind: ActivationKind, has_probs: bool, blockwise: bool
) -> None:
    # A tile and a half; blocks of gate and up must be whole.
    x_RG, grad_RF, probs_R = _operands(kind, 128 if blockwise else 192)
    rows, probs = _rows(COUNTS), probs_R if has_probs else None
    x, p = x_RG.clone().requires_grad_(), probs_R.clone().requires_grad_()
    with exact_fp8():
        y_RF = activation(x, kind, p if has_probs else None, backend="triton")
        y_RF.backward(grad_RF)
        assert x.grad is not None
        forward = _quantized(y_RF.detach(), rows, torch.float8_e4m3fn, blockwise=blockwise)
        backward = _quantized(x.grad, rows, torch.float8_e5m2, blockwise=blockwise)
    for tiling in TILINGS:
        with exact_fp8():
            got = activate(x_RG, kind, probs, rows, torch.float8_e4m3fn, blockwise=blockwise, tiling=tiling)
            grad, grad_probs = activate_backward(
                grad_RF, x_RG, kind, probs, rows, torch.float8_e5m2, blockwise=blockwise, tiling=tiling
            )
        _assert_same(got, forward, rows)
        _assert_same(grad, backward, rows)
        assert (grad_probs is not None) == has_probs
        if grad_probs is not None:
            torch.testing.assert_close(grad_probs, p.grad, rtol=1e-4, atol=1e-5)  # sums of fp32 in another order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiling", TILINGS[1:])
def test_what_is_no_number_stays_none(kind: ActivationKind, tiling: Tiling) -> None:
    x_RG, grad_RF, probs_R = _operands(kind, 192)
    x_RG[5, 6] = float("nan")
    rows = _rows(COUNTS)
    with exact_fp8():
        y = activate(x_RG, kind, probs_R, rows, torch.float8_e4m3fn, blockwise=False, tiling=tiling)
        grad, _ = activate_backward(
            grad_RF, x_RG, kind, probs_R, rows, torch.float8_e5m2, blockwise=False, tiling=tiling
        )
    used, num_gradients = int(rows.padded_end_E[-1]), 2 if x_RG.shape[1] > 192 else 1  # of gate and of up
    assert y.as_is[1].isfinite()
    for form, expected in ((y, 1), (grad, num_gradients)):
        assert int(form.as_is[0][:used].float().isnan().sum()) == expected
        assert int(form.turned[0][:, :used].float().isnan().sum()) == expected


def test_no_rows_are_nothing() -> None:
    rows = _rows([0, 0])
    pair = activate(torch.zeros(0, 256).bfloat16(), "swiglu", None, rows, torch.float8_e4m3fn, blockwise=False)
    assert (pair.as_is[0].shape, pair.turned[0].shape) == ((0, 128), (128, 0))


def test_a_scale_is_written_where_no_expert_has_the_rows() -> None:
    rows = padded_rows(torch.zeros(3, dtype=torch.int32), 50)
    x_RG = torch.ones(50, 256).bfloat16()
    with exact_fp8():
        pairs = (
            activate(x_RG, "swiglu", None, rows, torch.float8_e4m3fn, blockwise=False),
            activate_backward(x_RG[:, :128], x_RG, "swiglu", None, rows, torch.float8_e5m2, blockwise=False)[0],
            quantize_rows(x_RG, rows, torch.float8_e4m3fn, amax(x_RG)),
        )
    # Each from the largest of what there is, though nothing is stored.
    assert [bool(0 < pair.as_is[1] < 1) for pair in pairs] == [True] * 3
