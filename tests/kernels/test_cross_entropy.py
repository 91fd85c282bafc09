"""What every back end of cross entropy must do; a new one inherits Contract."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from moeplan.kernels import cross_entropy_torch
from moeplan.kernels.cross_entropy import BACKENDS, logit_gradient_, logit_stats

contract = settings(suppress_health_check=[HealthCheck.differing_executors], max_examples=20)


def _logits(T: int, V: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.randn(T, V, generator=torch.Generator().manual_seed(T * V), dtype=torch.float64) * 5).to(dtype)


class Contract:
    backend: str

    @contract
    @given(st.integers(1, 5), st.integers(2, 40))
    def test_loss_and_gradient_are_those_of_torch(self, T: int, V: int) -> None:
        logits_TV, targets_T = _logits(T, V).requires_grad_(), torch.arange(T) % V
        expected_T = F.cross_entropy(logits_TV, targets_T, reduction="none")
        weights_T = torch.arange(1, T + 1, dtype=torch.float64)
        (expected,) = torch.autograd.grad((expected_T * weights_T).sum(), logits_TV)
        own_TV = logits_TV.detach().clone()
        highest_T, sum_T, target_T = logit_stats(own_TV, targets_T, backend=self.backend)
        torch.testing.assert_close(highest_T, own_TV.amax(1))
        log_sum_T = highest_T + sum_T.log()
        torch.testing.assert_close(log_sum_T - target_T, expected_T.detach())
        got = logit_gradient_(own_TV, log_sum_T, weights_T, targets_T, backend=self.backend)
        assert got.data_ptr() == own_TV.data_ptr()
        torch.testing.assert_close(got, expected)

    def test_a_target_elsewhere_has_no_logit_and_takes_nothing_away(self) -> None:
        logits_TV, nowhere_T = _logits(3, 7), torch.full((3,), -1)
        highest_T, sum_T, target_T = logit_stats(logits_TV, nowhere_T, backend=self.backend)
        assert target_T.tolist() == [0, 0, 0]
        log_sum_T = highest_T + sum_T.log()
        probs_TV = logits_TV.softmax(1)
        got = logit_gradient_(logits_TV, log_sum_T, torch.ones(3, dtype=torch.float64), nowhere_T, backend=self.backend)
        torch.testing.assert_close(got, probs_TV)

    def test_bf16_logits_are_summed_in_fp32(self) -> None:
        logits_TV = torch.zeros(2, 1000, dtype=torch.bfloat16)
        stats = logit_stats(logits_TV, torch.zeros(2, dtype=torch.int64), backend=self.backend)
        assert {one.dtype for one in stats} == {torch.float32}
        assert stats.sum_T.tolist() == [1000, 1000]

    def test_very_negative_logits_do_not_matter(self) -> None:
        logits_TV = torch.tensor([[-1e9, 3.0, -1e9]])
        highest_T, sum_T, _ = logit_stats(logits_TV, torch.tensor([1]), backend=self.backend)
        assert (highest_T.item(), sum_T.item()) == (3, 1)


class TestTorch(Contract):
    backend = "torch"

    def test_blocks_of_tokens_do_not_show(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logits_TV, targets_T = _logits(7, 5), torch.arange(7) % 5
        whole = logit_stats(logits_TV, targets_T, backend="torch")
        monkeypatch.setattr(cross_entropy_torch, "_BLOCK_ELEMENTS", 12)
        for one, other in zip(whole, logit_stats(logits_TV, targets_T, backend="torch"), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
class TestTriton(Contract):
    backend = "triton"


def test_every_back_end_has_a_contract_test() -> None:
    assert {contract_class.backend for contract_class in Contract.__subclasses__()} == set(BACKENDS)
