import pytest
import torch
from torch.nn import functional as F

from moeplan.kernels import flash_attention
from moeplan.kernels.flash_attention import attend, shape_of, takes


def _heads(S: int, N: int, M: int, D: int, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(S + N)
    sizes = ((N, D), (M, D), (M, D))
    return tuple(torch.randn(2, S, *size, generator=generator).bfloat16().to(device).requires_grad_() for size in sizes)


def test_a_cpu_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "installed_version", lambda: "4.0.0")
    q_BSND, _, v_BSMD = _heads(8, 4, 2, 64, "cpu")
    assert not takes(q_BSND, v_BSMD)


def test_a_choice_is_by_heads_and_widths() -> None:
    assert shape_of(*_heads(8, 4, 2, 64, "cpu")) == (4, 2, 64, 64)


@pytest.mark.gpu
@pytest.mark.skipif(flash_attention.installed_version() is None, reason="flash-attn-4 is not installed")
@pytest.mark.parametrize("S", [1, 77, 256, 1000])
@pytest.mark.parametrize("heads", [(8, 8, 64), (8, 2, 128), (6, 1, 96)])
def test_outputs_and_gradients_are_those_of_the_formula(S: int, heads: tuple[int, int, int]) -> None:
    inputs = _heads(S, *heads, "cuda")
    if not takes(inputs[0], inputs[2]):
        pytest.skip("needs Hopper")
    out_BSND = attend(*inputs)
    grad_BSND = torch.randn_like(out_BSND)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for x in exact)
    k, v = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
    mask_SS = torch.ones(S, S, dtype=torch.bool, device="cuda").tril()
    scores = (q @ k.transpose(2, 3) * heads[2] ** -0.5).masked_fill(~mask_SS, -torch.inf)
    expected_BSND = (F.softmax(scores, 3) @ v).transpose(1, 2)
    got = out_BSND, *torch.autograd.grad(out_BSND, inputs, grad_BSND)
    expected = expected_BSND, *torch.autograd.grad(expected_BSND, exact, grad_BSND.double())
    for one, other in zip(got, expected, strict=True):
        # bf16 rounds probabilities and outputs to 2**-9 of themselves, gradients of scores once more; of one key the
        # gradients of queries and keys are zero but for that.
        assert float((one.double() - other).norm() / other.norm().clamp(min=1)) < 0.01
