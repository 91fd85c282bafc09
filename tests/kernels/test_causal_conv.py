"""The short convolution of documents: by hand, and the kernel against torch."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.kernels.causal_conv import causal_conv

BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="compiled: test_on_gpu.py")),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_taps_by_hand(backend: str) -> None:
    x_BSC = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(1, 4, 1)
    weight_CK, bias_C = torch.tensor([[10.0, 1.0]], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    got = causal_conv(x_BSC, weight_CK, bias_C, (3, 1), backend=backend)
    expected = F.silu(torch.tensor([1.5, 12.5, 23.5, 4.5], dtype=torch.float64))
    torch.testing.assert_close(got.flatten(), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
@pytest.mark.parametrize("documents", [(37,), (1, 5, 2, 29)])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_kernel_does_what_torch_does(documents: tuple[int, ...], taps: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(taps)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    whole_BSW, weight_CK, bias_C = draw(2, 37, 90), draw(70, taps), draw(70) if has_bias else None
    inputs = [whole_BSW, weight_CK, *([] if bias_C is None else [bias_C])]
    direction = torch.randn(2, 37, 70, generator=generator, dtype=torch.float64)
    outs, grads = [], []
    for backend in ("triton", "torch"):
        out = causal_conv(whole_BSW[..., 10:80], weight_CK, bias_C, documents, backend=backend)  # of a view
        outs.append(out)
        grads.append(torch.autograd.grad(out, inputs, direction))
    torch.testing.assert_close(outs[0], outs[1])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_half_precision_comes_back_as_it_went() -> None:
    x_BSC, weight_CK = torch.ones(1, 8, 4, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.bfloat16)
    for backend in ("torch", "triton") if not torch.cuda.is_available() else ("torch",):
        out = causal_conv(x_BSC, weight_CK, None, (8,), backend=backend)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out[0, :3, 0].float(), F.silu(torch.tensor([1.0, 2.0, 3.0])), rtol=2**-7, atol=0)
