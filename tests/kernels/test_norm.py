import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.kernels.norm import rms_norm, rms_norm_reference


def test_a_row_done_by_hand() -> None:
    # mean(x**2) = (9 + 16) / 2 = 12.5; 12.5 + 12.5 = 25.
    y = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), 12.5)
    torch.testing.assert_close(y, torch.tensor([[0.6, 8.0]]))


@settings(max_examples=20)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=2), st.integers(1, 5))
def test_output_is_torchs_and_gradients_are_exact(leading: list[int], width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x_H = torch.randn(*leading, width, generator=generator, dtype=torch.float64, requires_grad=True)
    weight_H = torch.randn(width, generator=generator, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        rms_norm(x_H, weight_H, 1e-6), torch.nn.functional.rms_norm(x_H, (width,), weight_H, 1e-6)
    )
    torch.testing.assert_close(rms_norm(x_H, weight_H, 1e-6), rms_norm_reference(x_H, weight_H, 1e-6))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (x_H, weight_H))


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 128), (2050, 2), (3, 1000), (0, 16)])
def test_the_kernel_does_what_the_formula_says(shape: tuple[int, ...]) -> None:
    from moeplan.kernels import norm_triton

    generator = torch.Generator().manual_seed(len(shape))
    x_H = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    weight_H = torch.randn(shape[-1], generator=generator, dtype=torch.float64, requires_grad=True)
    got, expected = norm_triton.rms_norm(x_H, weight_H, 1e-6), rms_norm_reference(x_H, weight_H, 1e-6)
    torch.testing.assert_close(got, expected)
    direction = torch.randn(shape, generator=generator, dtype=torch.float64)
    grads, expected_grads = (torch.autograd.grad(y, (x_H, weight_H), direction) for y in (got, expected))
    for one, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_bf16_is_normed_in_fp32() -> None:
    x_H = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    weight_H = torch.ones(256, dtype=torch.bfloat16, requires_grad=True)
    y_H = rms_norm(x_H, weight_H, 1e-6)
    y_H.square().sum().backward()
    assert x_H.grad is not None
    assert y_H.dtype == x_H.grad.dtype == torch.bfloat16
    exact_H = rms_norm_reference(x_H.detach().float(), torch.ones(256), 1e-6)
    torch.testing.assert_close(y_H, exact_H.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_the_input_and_one_number_a_row(dtype: torch.dtype) -> None:
    x_H = torch.ones(6, 32, dtype=dtype, requires_grad=True)
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rms_norm(x_H, torch.ones(32, dtype=dtype, requires_grad=True), 1e-6)
    assert sizes == [6 * 32, 32, 6]
