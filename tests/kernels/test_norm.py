import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.kernels.norm import residual_rms_norm, rms_norm, rms_norm_reference


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


@pytest.mark.parametrize("has_update", [False, True])
def test_gradients_of_stream_and_norm_add_up(has_update: bool) -> None:
    inputs = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(1 + has_update)]
    weight_H = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def both(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return residual_rms_norm(tensors[0], tensors[1] if has_update else None, tensors[-1], 1e-6)

    assert torch.equal(both(*inputs, weight_H)[0], sum(inputs, torch.zeros(3, 4)))
    assert torch.autograd.gradcheck(both, (*inputs, weight_H))
    assert torch.autograd.gradcheck(lambda *tensors: both(*tensors)[0], (*inputs, weight_H))


def _residual_rms_norm_reference(
    x_H: torch.Tensor, update_H: torch.Tensor | None, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    sum_H = x_H if update_H is None else x_H + update_H
    return sum_H, rms_norm_reference(sum_H, weight_H, eps)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 128), (2050, 2), (3, 1000), (0, 16)])
@pytest.mark.parametrize("has_update", [False, True])
def test_the_kernel_does_what_the_formula_says(shape: tuple[int, ...], has_update: bool) -> None:
    from moeplan.kernels import norm_triton

    generator = torch.Generator().manual_seed(len(shape))
    x_H, update_H, *directions = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(4)
    )
    weight_H = torch.randn(shape[-1], generator=generator, dtype=torch.float64, requires_grad=True)
    inputs = (x_H, update_H, weight_H) if has_update else (x_H, weight_H)
    arguments = (x_H, update_H if has_update else None, weight_H, 1e-6)
    got, expected = norm_triton.residual_rms_norm(*arguments), _residual_rms_norm_reference(*arguments)
    for index in (slice(0, 2), slice(1, 2)):  # with and without a gradient of the stream
        torch.testing.assert_close(got[index], expected[index])
        grads, expected_grads = (
            torch.autograd.grad(outputs[index], inputs, directions[index], retain_graph=True)
            for outputs in (got, expected)
        )
        for one, other in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(one, other)
    stream_only = torch.autograd.grad(got[0], inputs[:-1], directions[0])
    assert all(grad.equal(directions[0]) for grad in stream_only)


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
def test_backward_keeps_the_sum_and_one_number_a_row(dtype: torch.dtype) -> None:
    x_H = torch.ones(6, 32, dtype=dtype, requires_grad=True)
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rms_norm(x_H, torch.ones(32, dtype=dtype, requires_grad=True), 1e-6)
        residual_rms_norm(x_H, x_H.detach(), torch.ones(32, dtype=dtype, requires_grad=True), 1e-6)
    assert sizes == [6 * 32, 32, 6] * 2
