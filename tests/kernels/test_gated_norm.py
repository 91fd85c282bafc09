"""Gated RMS norm: rows by hand, and the kernel against torch."""

import pytest
import torch
from torch import Tensor

from moeplan.kernels.gated_norm import gated_norm

BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="compiled: test_on_gpu.py")),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_by_hand(backend: str) -> None:
    x_GW = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    gate_GW, weight_W = torch.tensor([[[0.0, 2.0]]], dtype=torch.float64), torch.tensor([1.0, 10.0]).double()
    silu = 2 / (1 + torch.exp(torch.tensor(-2.0, dtype=torch.float64)))
    # mean(x**2) = (9 + 16) / 2 = 12.5; 12.5 + 12.5 = 25. Gated first: x is (0, 4 silu).
    after = gated_norm(x_GW, gate_GW, weight_W, 12.5, gate_first=False, backend=backend)
    torch.testing.assert_close(after.flatten(), torch.stack([torch.zeros_like(silu), 8 * silu]))
    first = gated_norm(x_GW, gate_GW, weight_W, 1e-12, gate_first=True, backend=backend)
    torch.testing.assert_close(first.flatten(), torch.tensor([0.0, 10 * 2**0.5]).double())


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("weight_shape", [(20,), (3, 20)])
def test_the_kernel_does_what_torch_does(gate_first: bool, weight_shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = draw(2, 37, 3, 20), draw(2, 37, 70), draw(*weight_shape)
    direction = torch.randn(2, 37, 3, 20, generator=generator, dtype=torch.float64)
    outs, grads = [], []
    for backend in ("triton", "torch"):
        gate = inputs[1][..., 5:65].unflatten(2, (3, 20))  # of a projection
        out = gated_norm(inputs[0], gate, inputs[2], 1e-6, gate_first=gate_first, backend=backend)
        outs.append(out)
        grads.append(torch.autograd.grad(out, inputs, direction))
    torch.testing.assert_close(outs[0], outs[1])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
