"""The experts' fused MLP in FP8 against its parts one after another, under Triton's interpreter."""

import pytest
import torch
from torch import Tensor, nn

from moeplan.executor import quantized, quantized_experts
from moeplan.executor.moe import Experts
from moeplan.executor.quantized import QuantizedWeight, expert_gemm, set_quantized
from moeplan.executor.saved_tensors import keeping
from moeplan.kernels.activation import ActivationKind, activation
from moeplan.kernels.permute import permute, permute_probs, unpermute
from moeplan.kernels.row_map import RowMap, row_map
from moeplan.run_config import RunConfig
from tests.executor.cases import run_steps
from tests.executor.precision_cases import GQA, low_plan
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


@pytest.mark.usefixtures("use_triton")
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_blockwise"])
def test_tokens_that_are_quantized_as_they_are_copied_give_what_their_copies_give(recipe: str) -> None:
    generator = torch.Generator().manual_seed(5)
    tokens_TH = torch.randn(90, 128, generator=generator).bfloat16()
    probs_TK = torch.rand(90, 2, generator=generator)
    grad_TH = torch.randn(90, 128, generator=generator).bfloat16()
    # Of three experts the second gets nothing; both copies of the last token go to one.
    index_TK = torch.tensor([[0, 2]] * 60 + [[2, 2]] * 30)
    results = []
    for is_fused in (True, False):
        weights = _weights(recipe, "swiglu", keeps_input=False)
        x_TH, p_TK = tokens_TH.clone().requires_grad_(), probs_TK.clone().requires_grad_()
        rows = row_map(index_TK, 3)
        with exact_fp8():
            probs_R = permute_probs(p_TK, rows)
            if is_fused:
                y_TH = quantized_experts.quantized_experts_of_tokens(x_TH, probs_R, rows, weights, "swiglu")
            else:
                copies_RH = permute(x_TH, rows)
                y_RH = quantized_experts.quantized_experts(copies_RH, probs_R, rows.offsets_E, weights, "swiglu")
                y_TH = unpermute(y_RH, rows)
            grads = torch.autograd.grad(y_TH, (x_TH, p_TK, *weights), grad_TH)
        results.append((y_TH, *grads))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.usefixtures("use_triton")
def test_a_rank_that_is_alone_trains_as_if_its_tokens_had_travelled(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, run = low_plan(GQA, 1, precision="fp8_current", global_batch_size=2), RunConfig(steps=2, lr=1e-3)
    run_on_tokens, num_tokens = Experts.run_on_tokens, list[int]()

    def counted(self: Experts, x_LH: Tensor, probs_R: Tensor, rows: RowMap) -> Tensor:
        num_tokens.append(len(x_LH))
        return run_on_tokens(self, x_LH, probs_R, rows)

    monkeypatch.setattr(Experts, "run_on_tokens", counted)
    with exact_fp8():
        outcomes = [run_steps(0, plan, run, run.steps)]
        assert num_tokens == [32] * 4  # one MoE layer, two sequences of two steps
        monkeypatch.setattr(Experts, "takes_tokens", False)
        outcomes.append(run_steps(0, plan, run, run.steps))
    assert len(num_tokens) == 4
    assert outcomes[0].losses == outcomes[1].losses
    assert outcomes[0].grad_norms == outcomes[1].grad_norms
