"""The gated delta rule: chunks against one token after the other, and that against a state done by hand."""

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeplan.kernels.delta_rule import BACKENDS, default_backend, gated_delta_rule
from moeplan.kernels.delta_rule_reference import DeltaTokens


def drawn(documents: tuple[int, ...], *, key_heads: int = 2, share: int = 2) -> DeltaTokens:
    """Two sequences of keys that are much alike, so that corrections matter."""
    generator = torch.Generator().manual_seed(sum(documents) + key_heads)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, sum(documents), *shape, generator=generator, dtype=torch.float64)

    heads = key_heads * share
    tokens = (draw(key_heads, 4), draw(key_heads, 4) + 1, draw(heads, 3), -draw(heads).abs(), draw(heads).sigmoid())
    return DeltaTokens(*(x.requires_grad_() for x in tokens))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_two_tokens_done_by_hand(backend: str) -> None:
    k = torch.tensor([[3.0, 4.0], [3.0, 4.0]], dtype=torch.float64)[None, :, None]
    v = torch.full((1, 2, 1, 1), 10.0, dtype=torch.float64)
    half = torch.full((1, 2, 1), 0.5, dtype=torch.float64)
    tokens = DeltaTokens(k, k, v, half.log(), half)
    # Of the same key: 0.5 x 10 after one token; halved to 2.5 and corrected by 0.5 x (10 - 2.5) after two.
    expected = torch.tensor([5.0, 6.25], dtype=torch.float64) / 2**0.5
    out = gated_delta_rule(tokens, (2,), backend=backend)
    torch.testing.assert_close(out.flatten(), expected, rtol=1e-7, atol=0)
    apart = gated_delta_rule(tokens, (1, 1), backend=backend)
    torch.testing.assert_close(apart.flatten(), expected[[0, 0]], rtol=1e-7, atol=0)


@settings(max_examples=12)
@given(st.lists(st.integers(1, 11), min_size=1, max_size=3), st.integers(1, 12), st.integers(1, 2), st.integers(1, 3))
def test_chunks_of_any_size_give_what_single_tokens_give(
    lengths: list[int], chunk_size: int, key_heads: int, share: int
) -> None:
    documents = tuple(lengths)
    tokens = drawn(documents, key_heads=key_heads, share=share)
    expected, got = (
        gated_delta_rule(tokens, documents, chunk_size=chunk_size, backend=backend)
        for backend in ("reference", "torch")
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    direction = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    grads = (torch.autograd.grad(out, tuple(tokens), direction) for out in (got, expected))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
@pytest.mark.parametrize("lengths, chunk_size, share", [((5, 9, 3), 4, 2), ((37,), 16, 1), ((8, 8), 64, 3)])
def test_the_kernel_goes_from_chunk_to_chunk_as_torch_does(
    lengths: tuple[int, ...], chunk_size: int, share: int
) -> None:
    exact = drawn(lengths, share=share)
    single = DeltaTokens(*(x.detach().float().requires_grad_() for x in exact))
    got = gated_delta_rule(single, lengths, chunk_size=chunk_size, backend="triton")
    expected = gated_delta_rule(exact, lengths, chunk_size=chunk_size, backend="torch")
    direction = torch.linspace(-1, 1, got.numel()).view_as(got)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    grads = torch.autograd.grad(got, tuple(single), direction)
    wanted = torch.autograd.grad(expected, tuple(exact), direction.double())
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_documents_do_not_see_each_other() -> None:
    tokens = drawn((5, 9, 3))
    out = gated_delta_rule(tokens, (5, 9, 3), chunk_size=4)
    alone = gated_delta_rule(DeltaTokens(*(x[:, 5:14] for x in tokens)), (9,), chunk_size=4)
    torch.testing.assert_close(out[:, 5:14], alone)


def test_strong_decay_over_a_long_chunk_stays_finite() -> None:
    tokens = DeltaTokens(*(x.detach().float() for x in drawn((64,))))
    decay = torch.full_like(tokens.beta, -20.0).requires_grad_()
    out = gated_delta_rule(tokens._replace(log_decay=decay), (64,))
    out.sum().backward()
    assert decay.grad is not None
    assert bool(out.isfinite().all())
    assert bool(decay.grad.isfinite().all())


def test_half_precision_has_its_state_in_fp32() -> None:
    half = DeltaTokens(*(x.detach().bfloat16() for x in drawn((96,))))
    out = gated_delta_rule(half, (96,), chunk_size=32)
    exact = gated_delta_rule(DeltaTokens(*(x.double() for x in half)), (96,), backend="reference")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.bfloat16(), rtol=2**-7, atol=1e-5)  # half a step of bf16


def test_the_library_gets_documents_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What flash-linear-attention is given and gives, played by the reference."""
    seen: dict[str, Any] = {}

    def chunk_gated_delta_rule(*tokens: Tensor, **options: Any) -> tuple[Tensor, None]:
        seen.update(options)
        lengths = tuple(end - start for start, end in pairwise(options["cu_seqlens"].tolist()))
        assert {x.shape[:3] for x in tokens} == {(1, sum(lengths), 4)}
        return BACKENDS["reference"](DeltaTokens(*tokens), lengths, 1), None

    library = ModuleType("fla.ops.gated_delta_rule")
    vars(library)["chunk_gated_delta_rule"] = chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, library.__name__, library)
    tokens = drawn((3, 6))
    got = gated_delta_rule(tokens, (3, 6), backend="fla")
    torch.testing.assert_close(got, gated_delta_rule(tokens, (3, 6)), rtol=0, atol=1e-6)  # decays there are fp32
    assert seen["use_qk_l2norm_in_kernel"]


def test_a_cpu_takes_torch() -> None:
    assert default_backend(torch.ones(1, dtype=torch.bfloat16)) == "torch"
