"""What every back end of GEMMs between tokens and rows must do; a new one inherits Contract."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeplan.kernels.gathered_gemm import BACKENDS, gathered_gemm, summed_gemm
from moeplan.kernels.main_grad import MainGrad, set_main_grad
from moeplan.kernels.row_map import row_map

contract = settings(suppress_health_check=[HealthCheck.differing_executors], max_examples=8, deadline=None)
# Sums of at most 200 products of unit normals in fp32, in another order than the reference's.
TOLERANCE = 1e-5


def _formula(x_TH: torch.Tensor, weight_EHF: torch.Tensor, index_TK: torch.Tensor) -> torch.Tensor:
    """Every token times every expert [T, E, F]: shares no code with any back end."""
    every_TEF = torch.einsum("th,ehf->tef", x_TH, weight_EHF)
    return every_TEF.gather(1, index_TK[..., None].expand(-1, -1, weight_EHF.shape[2]))


class Contract:
    backend: str

    def _check(self, index_TK: torch.Tensor, E: int, H: int, F: int) -> None:
        generator = torch.Generator().manual_seed(index_TK.numel() + E)
        x_TH, other_TF = (torch.randn(len(index_TK), width, generator=generator) for width in (H, F))
        weight_EHF = torch.randn(E, H, F, generator=generator)
        rows = row_map(index_TK, E)
        slots = rows.slot_of_row_R.long()
        first = [x_TH.requires_grad_(), weight_EHF.requires_grad_()]
        exact = [one.detach().double().requires_grad_() for one in first]
        got = gathered_gemm(first[0], first[1], rows, backend=self.backend)
        expected = _formula(exact[0], exact[1], index_TK).flatten(0, 1)[slots]
        self._same(got, expected, first, exact)
        rows_RH = torch.randn(len(slots), H, generator=generator).requires_grad_()
        first, exact = [rows_RH, weight_EHF], [rows_RH.detach().double().requires_grad_(), exact[1]]
        got = summed_gemm(rows_RH, weight_EHF, rows, backend=self.backend)
        expert_R = index_TK.flatten()[slots]
        each_RF = torch.einsum("rh,rhf->rf", exact[0], exact[1][expert_R])
        expected = torch.zeros_like(other_TF, dtype=torch.float64).index_add(0, slots // index_TK.shape[1], each_RF)
        self._same(got, expected, first, exact)

    @staticmethod
    def _same(got: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
        direction = torch.randn(got.shape, generator=torch.Generator().manual_seed(3))
        grads = torch.autograd.grad(got, inputs, direction)
        expected_grads = torch.autograd.grad(expected, exact, direction.double())
        for one, other in zip((got, *grads), (expected, *expected_grads), strict=True):
            assert (one.shape, one.dtype) == (other.shape, torch.float32)
            error = float((one.detach() - other.detach()).norm() / other.detach().norm().clamp(min=1))
            assert error < TOLERANCE

    @contract
    @given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 3))
    def test_ragged_groups(self, num_tokens: int, E: int, K: int) -> None:
        generator = torch.Generator().manual_seed(num_tokens)
        index_TK = torch.rand(num_tokens, E, generator=generator).topk(min(E, K)).indices
        self._check(index_TK, E, 8, 12)

    @pytest.mark.parametrize("num_tokens, E, K, H, F", [(150, 2, 1, 72, 20), (33, 16, 16, 8, 260), (5, 512, 8, 8, 8)])
    def test_more_rows_columns_and_experts_than_a_tile(self, num_tokens: int, E: int, K: int, H: int, F: int) -> None:
        index_TK = torch.rand(num_tokens, E, generator=torch.Generator().manual_seed(E)).topk(K).indices
        self._check(index_TK, E, H, F)

    def test_one_expert_takes_all(self) -> None:
        self._check(torch.full((130, 1), 3), 5, 8, 8)

    def test_weights_with_main_gradients_get_theirs_there(self) -> None:
        index_TK = torch.tensor([[0, 1], [2, 0], [0, 2]])
        rows, weight = row_map(index_TK, 3), torch.randn(3, 8, 8, requires_grad=True)
        main = MainGrad(torch.full((3, 8, 8), torch.nan))
        set_main_grad(weight, main)
        y = gathered_gemm(torch.ones(3, 8, requires_grad=True), weight, rows, backend=self.backend)
        y.sum().backward()
        assert weight.grad is None
        assert main.total[:, 0, 0].tolist() == [3.0, 1.0, 2.0]


class TestCopy(Contract):
    backend = "copy"


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
class TestTritonGather(Contract):
    backend = "triton_gather"


def test_every_back_end_has_a_contract_test() -> None:
    assert {contract.backend for contract in Contract.__subclasses__()} == set(BACKENDS)
