"""What every grouped GEMM back end must do; a new one inherits Contract."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeplan.kernels import grouped_gemm_quack
from moeplan.kernels.grouped_gemm import BACKENDS, grouped_gemm
from moeplan.kernels.grouped_gemm_quack import TILES
from moeplan.kernels.grouped_mm_limits import is_supported
from moeplan.kernels.grouped_weight_grad import add_parts_
from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.weight_grad_pairs import Operands
from tests.kernels.optional_packages import skip_without


def _case(
    num_rows: list[int], H: int, F: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(num_rows) + H + F)
    T, E = sum(num_rows), len(num_rows)
    x_TH = torch.randn(T, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight_EHF = torch.randn(E, H, F, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    grad_TF = torch.randn(T, F, generator=generator, dtype=torch.float64).to(dtype)
    return x_TH, weight_EHF, torch.tensor(num_rows).cumsum(0).to(torch.int32), grad_TF


def _one_hot(x_TH: torch.Tensor, weight_EHF: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """Every row times every expert, masked: a formula that shares no code with any back end."""
    row_T = torch.arange(len(x_TH))[:, None]
    starts_E = torch.cat((offsets_E.new_zeros(1), offsets_E[:-1]))
    mask_TE = ((row_T >= starts_E) & (row_T < offsets_E)).to(x_TH.dtype)
    return torch.einsum("te,th,ehf->tf", mask_TE, x_TH, weight_EHF)


# A contract test runs once per back end, in a class of its own each time; examples do not depend on the class.
contract = settings(suppress_health_check=[HealthCheck.differing_executors])


class Contract:
    backend: str
    dtype = torch.float32

    @contract
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.sampled_from([(8, 16), (5, 3)]))
    def test_output_and_gradients_are_those_of_the_formula(self, num_rows: list[int], widths: tuple[int, int]) -> None:
        x_TH, weight_EHF, offsets_E, grad_TF = _case(num_rows, *widths, self.dtype)
        y_TF = grouped_gemm(x_TH, weight_EHF, offsets_E, backend=self.backend)
        grads = torch.autograd.grad(y_TF, (x_TH, weight_EHF), grad_TF)
        exact = [tensor.detach().double().requires_grad_() for tensor in (x_TH, weight_EHF)]
        expected_TF = _one_hot(exact[0], exact[1], offsets_E)
        expected_grads = torch.autograd.grad(expected_TF, exact, grad_TF.double())
        for got, expected in zip((y_TF, *grads), (expected_TF, *expected_grads), strict=True):
            assert got.dtype == self.dtype
            # Sums of at most 45 products of unit normals; bf16 rounds each result to 2**-8.
            torch.testing.assert_close(got.double(), expected, rtol=3 * torch.finfo(self.dtype).eps, atol=1e-5)

    @pytest.mark.parametrize("num_rows", [[0, 0, 12, 0], [12, 0, 0, 0], [0, 0, 0, 0], [3, 0, 1, 8]])
    def test_an_expert_without_rows_gets_a_zero_gradient(self, num_rows: list[int]) -> None:
        x_TH, weight_EHF, offsets_E, grad_TF = _case(num_rows, 8, 16, self.dtype)
        grouped_gemm(x_TH, weight_EHF, offsets_E, backend=self.backend).backward(grad_TF)
        assert weight_EHF.grad is not None
        assert weight_EHF.grad.flatten(1).any(1).tolist() == [count > 0 for count in num_rows]

    def test_a_gradient_of_stride_zero_is_taken(self) -> None:
        x_TH, weight_EHF, offsets_E, _ = _case([3, 5], 8, 16, self.dtype)
        grouped_gemm(x_TH, weight_EHF, offsets_E, backend=self.backend).sum().backward()
        assert x_TH.grad is not None
        torch.testing.assert_close(x_TH.grad[0], weight_EHF[0].sum(1), rtol=0.02, atol=1e-5)

    def test_frozen_weights_get_no_gradient(self) -> None:
        x_TH, weight_EHF, offsets_E, grad_TF = _case([3, 5], 8, 16, self.dtype)
        y_TF = grouped_gemm(x_TH, weight_EHF.detach(), offsets_E, backend=self.backend)
        (grad_x_TH,) = torch.autograd.grad(y_TF, x_TH, grad_TF)
        assert grad_x_TH.shape == x_TH.shape


class TestReference(Contract):
    backend = "reference"


class TestReferenceDouble(Contract):
    backend = "reference"
    dtype = torch.float64


class TestByExpert(Contract):
    backend = "by_expert"


class TestTorch(Contract):
    backend = "torch"


class TestTorchDouble(Contract):
    backend = "torch"
    dtype = torch.float64


class TestTorchBf16(Contract):
    backend = "torch"
    dtype = torch.bfloat16


def test_every_back_end_has_a_contract_test() -> None:
    """Those of quack need a GPU: ``test_cuda_bf16_agrees_with_the_reference``."""
    assert {contract.backend for contract in Contract.__subclasses__()} == set(BACKENDS) - set(TILES)


def test_without_the_package_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_gemm_quack, "installed_version", lambda: None)
    x_TH, weight_EHF, *_ = _case([3, 5], 8, 16, torch.bfloat16)
    assert not grouped_gemm_quack.takes(x_TH, weight_EHF)


def test_quack_gets_its_operands_with_rows_counted_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its call computes, by its own documentation, in place of the package."""
    calls: list[str] = []

    def gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *_: object, **kwargs: Any) -> None:
        starts = kwargs["cu_seqlens_m" if "cu_seqlens_m" in kwargs else "cu_seqlens_k"].tolist()
        for e, (start, end) in enumerate(itertools.pairwise(starts)):
            if "cu_seqlens_m" in kwargs:
                out[start:end] = a[start:end] @ b[e].t()
            else:
                part = (a[:, start:end] @ b[:, start:end].t()).float()
                out[e] = out[e] + part if kwargs["add_to_output"] else part
        calls.append("rows" if "cu_seqlens_m" in kwargs else "add" if kwargs["add_to_output"] else "write")

    monkeypatch.setattr(grouped_gemm_quack, "_gemm", lambda: gemm)
    x_TH, weight_EHF, offsets_E, grad_TF = _case([3, 0, 5], 8, 16, torch.float32)
    y_TF = grouped_gemm(x_TH, weight_EHF, offsets_E, backend="quack_128x192")
    got = y_TF, *torch.autograd.grad(y_TF, x_TH, grad_TF)
    y_TF = grouped_gemm(x_TH, weight_EHF, offsets_E, backend="reference")
    grad_x_TH, grad_EHF = torch.autograd.grad(y_TF, (x_TH, weight_EHF), grad_TF)
    torch.testing.assert_close(got, (y_TF, grad_x_TH))
    main = MainGrad(torch.full_like(weight_EHF, torch.nan, requires_grad=False))
    part = Operands(x_TH.detach(), grad_TF, offsets_E)
    add_parts_(main, (part,), backend="quack_128x128")
    add_parts_(main, (part, part), backend="quack_128x128")
    torch.testing.assert_close(main.total, 3 * grad_EHF)
    assert calls == ["rows", "rows", "write", "add", "add"]


@pytest.mark.parametrize(
    "dtype,H,F,expected",
    [
        (torch.float32, 8, 16, True),
        (torch.float32, 5, 16, False),
        (torch.bfloat16, 8, 16, True),
        (torch.bfloat16, 4, 16, False),
        (torch.float64, 8, 16, False),
    ],
)
def test_torch_takes_whole_16_byte_words(dtype: torch.dtype, H: int, F: int, expected: bool) -> None:
    assert is_supported(torch.zeros(2, H, dtype=dtype), torch.zeros(1, H, F, dtype=dtype)) is expected


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("widths", [(64, 96), (384, 264)])
@pytest.mark.parametrize("num_rows", [[7, 0, 40, 17], [0, 0, 640, 0], [1, 2, 3, 4], [0, 0], [37] * 512])
def test_cuda_bf16_agrees_with_the_reference(num_rows: list[int], widths: tuple[int, int], backend: str) -> None:
    results = []
    skip_without(backend)
    for name in (backend, "reference"):
        x_TH, weight_EHF, offsets_E, grad_TF = (
            tensor.detach().cuda() for tensor in _case(num_rows, *widths, torch.bfloat16)
        )
        x_TH.requires_grad_()
        weight_EHF.requires_grad_()
        y_TF = grouped_gemm(x_TH, weight_EHF, offsets_E, backend=name)
        results.append((y_TF, *torch.autograd.grad(y_TF, (x_TH, weight_EHF), grad_TF)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.1)
