"""Blocks of attention that add up to attention over all keys."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.executor.attention_block import block_backward, block_forward

NUM_KEYS = 128


def two_blocks(device: str, dtype: torch.dtype, v_width: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Output and gradients of causal attention in two blocks of keys, and what torch says of the whole."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 4, NUM_KEYS, 32), (2, 2, NUM_KEYS, 32), (2, 2, NUM_KEYS, v_width), (2, 4, NUM_KEYS, v_width))
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    half = NUM_KEYS // 2
    (low, low_lse), (high, high_lse), (past, past_lse) = (
        block_forward(q[:, :, :half], k[:, :, :half], v[:, :, :half], causal=True),
        block_forward(q[:, :, half:], k[:, :, half:], v[:, :, half:], causal=True),
        block_forward(q[:, :, half:], k[:, :, :half], v[:, :, :half], causal=False),
    )
    lse = torch.logaddexp(high_lse, past_lse)
    high = high * (high_lse - lse).exp()[..., None] + past * (past_lse - lse).exp()[..., None]
    out, all_lse = torch.cat([low, high.to(dtype)], 2), torch.cat([low_lse, lse], 2)
    grads = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    for rows, columns, causal in (((0, half), (0, half), True), ((half, NUM_KEYS), (half, NUM_KEYS), True),
                                  ((half, NUM_KEYS), (0, half), False)):  # fmt: skip
        row, column = slice(*rows), slice(*columns)
        inputs = (q[:, :, row], k[:, :, column], v[:, :, column])
        parts = block_backward(grad[:, :, row], inputs, out[:, :, row], all_lse[:, :, row], causal=causal)
        for whole, part, place in zip(grads, parts, (row, column, column), strict=True):
            whole[:, :, place] += part
    exact_q, exact_k, exact_v = leaves = tuple(x.double().requires_grad_() for x in (q, k, v))
    expected = F.scaled_dot_product_attention(exact_q, exact_k, exact_v, is_causal=True, enable_gqa=True)
    return (out, *grads), (expected.detach(), *torch.autograd.grad(expected, leaves, grad.double()))


@pytest.mark.parametrize("v_width", [32, 24])
def test_blocks_on_a_cpu(v_width: int) -> None:
    got, expected = two_blocks("cpu", torch.float64, v_width)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def assert_near(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """8 bits of mantissa in inputs, probabilities and outputs: 1 % of the largest value."""
    for part, whole in zip(got, expected, strict=True):
        torch.testing.assert_close(part.double(), whole, rtol=0, atol=0.01 * float(whole.abs().max()))


def test_blocks_in_bf16_on_a_cpu() -> None:
    assert_near(*two_blocks("cpu", torch.bfloat16, 24))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("v_width", [32, 24])
def test_flash_blocks_on_a_gpu(v_width: int) -> None:
    assert_near(*two_blocks("cuda", torch.bfloat16, v_width))
