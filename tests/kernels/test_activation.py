"""What every activation back end must do; a new one inherits Contract."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeplan.kernels.activation import BACKENDS, ActivationKind, activation

KINDS: tuple[ActivationKind, ...] = ("swiglu", "clamped_swiglu", "geglu", "gelu", "squared_relu")
GATED = ("swiglu", "clamped_swiglu", "geglu")


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _normal_cdf(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


# Formula of one element from gate and up (x and nothing for the kinds without a gate).
FORMULAS = {
    "swiglu": lambda gate, up: gate * _sigmoid(gate) * up,
    "clamped_swiglu": lambda gate, up: min(gate, 7) * _sigmoid(1.702 * min(gate, 7)) * (min(max(up, -7), 7) + 1),
    "geglu": lambda gate, up: gate * _normal_cdf(gate) * up,
    "gelu": lambda x, _: x * _normal_cdf(x),
    "squared_relu": lambda x, _: max(x, 0.0) ** 2,
}

# A contract test runs once per back end, in a class of its own each time; examples do not depend on the class.
contract = settings(suppress_health_check=[HealthCheck.differing_executors], max_examples=30)


def _inputs(R: int, G: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(R * G)
    x_RG = torch.randn(R, G, generator=generator, dtype=torch.float64)
    probs_R = torch.rand(R, generator=generator, dtype=torch.float64)
    return x_RG.to(dtype).requires_grad_(), probs_R.to(dtype).requires_grad_()


class Contract:
    backend: str

    @pytest.mark.parametrize("kind", KINDS)
    def test_each_element_is_the_formula_times_its_probability(self, kind: ActivationKind) -> None:
        x_RG, probs_R = _inputs(3, 4)
        y_RF = activation(x_RG, kind, probs_R, backend=self.backend)
        width = 2 if kind in GATED else 4
        assert y_RF.shape == (3, width)
        for r in range(3):
            for f in range(width):
                expected = FORMULAS[kind](x_RG[r, f].item(), x_RG[r, (f + width) % 4].item()) * probs_R[r].item()
                assert y_RF[r, f].item() == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("kind", KINDS)
    @contract
    @given(st.integers(0, 4), st.sampled_from([2, 6]))
    def test_gradients_are_exact(self, kind: ActivationKind, R: int, G: int) -> None:
        x_RG, probs_R = _inputs(R, G)
        assert torch.autograd.gradcheck(lambda x: activation(x, kind, backend=self.backend), (x_RG,))
        assert torch.autograd.gradcheck(lambda x, p: activation(x, kind, p, backend=self.backend), (x_RG, probs_R))

    @pytest.mark.parametrize("kind", KINDS)
    def test_bf16_rows_with_fp32_probabilities_stay_bf16(self, kind: ActivationKind) -> None:
        x_RG, _ = _inputs(5, 8, torch.bfloat16)
        probs_R = torch.linspace(0.1, 0.9, 5, requires_grad=True)
        y_RF = activation(x_RG, kind, probs_R, backend=self.backend)
        y_RF.sum().backward()
        exact = activation(x_RG.detach().double(), kind, probs_R.detach().double(), backend="reference")
        assert x_RG.grad is not None
        assert probs_R.grad is not None
        assert (y_RF.dtype, x_RG.grad.dtype, probs_R.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        # Three roundings to 2**-9 each at most.
        torch.testing.assert_close(y_RF.double(), exact, rtol=2**-7, atol=1e-3)

    def test_gpt_oss_cuts_off_what_is_large(self) -> None:
        x_RG = torch.tensor([[9.0, 2.0, -9.0, 8.0], [-9.0, 6.0, 3.0, -8.0]], dtype=torch.float64, requires_grad=True)
        y_RF = activation(x_RG, "clamped_swiglu", backend=self.backend)
        expected = [[FORMULAS["clamped_swiglu"](row[f], row[f + 2]) for f in (0, 1)] for row in x_RG.tolist()]
        torch.testing.assert_close(y_RF, torch.tensor(expected, dtype=torch.float64))
        (grad_RG,) = torch.autograd.grad(y_RF.sum(), x_RG)
        assert (grad_RG == 0).tolist() == [[True, False, True, True], [False, False, False, True]]
        assert torch.autograd.gradcheck(lambda x: activation(x, "clamped_swiglu", backend=self.backend), (x_RG,))

    def test_leading_dimensions_are_kept_without_probabilities(self) -> None:
        y = activation(torch.ones(2, 3, 8), "swiglu", backend=self.backend)
        assert y.shape == (2, 3, 4)

    def test_an_unknown_kind_is_refused(self) -> None:
        with pytest.raises(ValueError, match="unknown activation 'tanh'; known: swiglu"):
            activation(torch.ones(2, 8), "tanh", backend=self.backend)  # type: ignore[arg-type]


class TestReference(Contract):
    backend = "reference"


class TestTorch(Contract):
    backend = "torch"

    @pytest.mark.parametrize("kind", KINDS)
    def test_only_input_and_probabilities_are_kept(self, kind: ActivationKind) -> None:
        x_RG, probs_R = _inputs(3, 4)
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            activation(x_RG, kind, probs_R, backend="torch")
        assert [tensor.data_ptr() for tensor in saved] == [x_RG.data_ptr(), probs_R.data_ptr()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
class TestTriton(Contract):
    backend = "triton"


def test_every_back_end_has_a_contract_test() -> None:
    assert {contract_class.backend for contract_class in Contract.__subclasses__()} == set(BACKENDS)
