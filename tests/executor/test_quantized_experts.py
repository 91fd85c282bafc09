"""The experts' fused MLP in FP8 against its parts one after another, under Triton's interpreter."""

import pytest
import torch
from torch import Tensor, nn

from moeplan.executor import quantized, quantized_experts
from moeplan.executor.quantized import QuantizedWeight, expert_gemm, set_quantized
from moeplan.executor.saved_tensors import keeping
from moeplan.kernels.activation import ActivationKind, activation
from tests.kernels.fp8_interpreter import exact_fp8

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: tests/kernels/test_on_gpu.py")


def _relative(got: Tensor, expected: Tensor) -> float:
    return float(((got.double() - expected.double()).norm() / expected.double().norm()).detach())


@pytest.fixture
def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (quantized, quantized_experts):
        monkeypatch.setattr(module, "backend_of", lambda *_: "triton")


def _weights(recipe: str, kind: ActivationKind, *, keeps_input: bool) -> tuple[nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    gate_up = 256 if kind in {"swiglu", "geglu"} else 128
    shapes = ((3, 128, gate_up), (3, 128, 128))
    both = [nn.Parameter(torch.randn(shape, generator=generator).mul_(0.1).bfloat16()) for shape in shapes]
    for weight in both:
        set_quantized(weight, QuantizedWeight(recipe, is_input_first=True, keeps_input=keeps_input))
    return both[0], both[1]


@pytest.mark.usefixtures("use_triton")
@pytest.mark.parametrize(
    "recipe,kind,keeps_input",
    [
        ("fp8_current", "swiglu", False),
        ("fp8_current", "swiglu", True),
        ("fp8_blockwise", "geglu", False),
        ("fp8_current", "squared_relu", False),
    ],
)
def test_the_fused_mlp_equals_its_parts(recipe: str, kind: ActivationKind, keeps_input: bool) -> None:
    offsets_E = torch.tensor([70, 70, 200], dtype=torch.int32)
    rows_RH = torch.randn(200, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    probs_R = torch.rand(200, generator=torch.Generator().manual_seed(2))
    grad_RH = torch.randn(200, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    results = []
    for is_fused in (True, False):
        first, second = _weights(recipe, kind, keeps_input=keeps_input)
        x_RH, p_R = rows_RH.clone().requires_grad_(), probs_R.clone().requires_grad_()
        with exact_fp8(), keeping(lambda _: None):  # as in a layer that recomputes or offloads
            if is_fused:
                assert quantized_experts.is_fused(first, second, kind)
                y_RH = quantized_experts.quantized_experts(x_RH, p_R, offsets_E, (first, second), kind)
            else:
                hidden = expert_gemm(x_RH, first, offsets_E)
                y_RH = expert_gemm(activation(hidden, kind, p_R, backend="triton"), second, offsets_E)
            grads = torch.autograd.grad(y_RH, (x_RH, p_R, first, second), grad_RH)
        results.append((y_RH, *grads))
    for got, expected in zip(*results, strict=True):
        # The interpreter cuts fp32 to bf16 instead of rounding it (2**-8), and an element of FP8 may then fall on its
        # neighbour (2**-4 of it, in one of some hundreds).
        assert _relative(got, expected) < 0.015
