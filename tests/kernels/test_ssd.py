"""The recurrence of Mamba-2: chunks against one token after the other, and that against a state done by hand."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeplan.kernels.ssd import BACKENDS, default_backend, ssd
from moeplan.kernels.ssd_reference import SsdHeads, SsdTokens


def drawn(documents: tuple[int, ...], *, groups: int = 2, share: int = 2) -> tuple[SsdTokens, SsdHeads]:
    """Two sequences, with heads that forget at different rates."""
    generator = torch.Generator().manual_seed(sum(documents) + groups)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, heads = (2, sum(documents)), groups * share
    tokens = (draw(*batch, heads, 3), draw(*batch, heads).exp(), draw(*batch, groups, 4), draw(*batch, groups, 4))
    of_heads = (-draw(heads).exp(), draw(heads))
    return SsdTokens(*(x.requires_grad_() for x in tokens)), SsdHeads(*(x.requires_grad_() for x in of_heads))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_two_tokens_done_by_hand(backend: str) -> None:
    ones = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    tokens = SsdTokens(10 * ones, 2 * ones[..., 0], ones, 3 * ones)
    heads = SsdHeads(-torch.tensor([0.5], dtype=torch.float64).log().neg() / 2, torch.full((1,), 0.1))
    # A step of 2 at a rate of ln(0.5) / 2 halves the state: 20 after one token, 30 after two; times 3, and 1 of skip.
    out = ssd(tokens, heads, (2,), backend=backend)
    torch.testing.assert_close(out.flatten().tolist(), [61.0, 91.0], rtol=1e-7, atol=0)
    apart = ssd(tokens, heads, (1, 1), backend=backend)
    torch.testing.assert_close(apart.flatten().tolist(), [61.0, 61.0], rtol=1e-7, atol=0)


@settings(max_examples=12)
@given(st.lists(st.integers(1, 11), min_size=1, max_size=3), st.integers(1, 12), st.integers(1, 2), st.integers(1, 3))
def test_chunks_of_any_size_give_what_single_tokens_give(
    lengths: list[int], chunk_size: int, groups: int, share: int
) -> None:
    documents = tuple(lengths)
    tokens, heads = drawn(documents, groups=groups, share=share)
    expected, got = (
        ssd(tokens, heads, documents, chunk_size=chunk_size, backend=backend) for backend in ("reference", "torch")
    )
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    direction = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    grads = (torch.autograd.grad(out, (*tokens, *heads), direction) for out in (got, expected))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_documents_do_not_see_each_other() -> None:
    tokens, heads = drawn((5, 9, 3))
    out = ssd(tokens, heads, (5, 9, 3), chunk_size=4)
    alone = ssd(SsdTokens(*(x[:, 5:14] for x in tokens)), heads, (9,), chunk_size=4)
    torch.testing.assert_close(out[:, 5:14], alone)


def test_strong_decay_over_a_long_chunk_stays_finite() -> None:
    tokens, heads = drawn((64,))
    rate = torch.full_like(heads.rate, -20.0).float().requires_grad_()
    out = ssd(SsdTokens(*(x.detach().float() for x in tokens)), SsdHeads(rate, heads.skip.float()), (64,))
    out.sum().backward()
    assert rate.grad is not None
    assert bool(out.isfinite().all())
    assert bool(rate.grad.isfinite().all())


def test_states_are_handed_on_as_exactly_at_the_end_of_a_long_sequence() -> None:
    documents = (16384,)
    tokens, heads = drawn(documents, groups=1, share=1)
    tokens = SsdTokens(*(x.detach() for x in tokens))
    tokens = tokens._replace(time_step=tokens.time_step + 1)
    heads = SsdHeads(torch.tensor([-1.0], dtype=torch.float64), heads.skip.detach())
    exact = ssd(tokens, heads, documents, chunk_size=16)
    single = SsdTokens(*(x.float() for x in tokens)), SsdHeads(*(x.float() for x in heads))
    error = (ssd(*single, documents, chunk_size=16) - exact).abs() / exact.abs().max()
    # Decays add up to 4e4, whose neighbours in fp32 are 4e-3 apart.
    assert float(error.max()) < 1e-6


def test_half_precision_has_its_state_in_fp32() -> None:
    tokens, heads = drawn((96,))
    half = SsdTokens(*(x.detach().bfloat16() for x in tokens))._replace(time_step=tokens.time_step.detach().float())
    out = ssd(half, heads, (96,), chunk_size=32)
    exact = ssd(SsdTokens(*(x.double() for x in half)), heads, (96,), backend="reference")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.bfloat16(), rtol=2**-7, atol=1e-4)  # half a step of bf16


def test_the_library_is_told_which_document_a_token_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """What mamba_ssm is given and gives, played by the reference."""
    seen: dict[str, Any] = {}

    def scan(x: Tensor, dt: Tensor, rate: Tensor, *shared: Any, **options: Any) -> Tensor:
        seen.update(options)
        key, query, chunk_size = shared
        lengths = (x.shape[1],) if seen["seq_idx"] is None else tuple(seen["seq_idx"][0].bincount().tolist())
        return BACKENDS["reference"](SsdTokens(x, dt, key, query), SsdHeads(rate, options["D"]), lengths, chunk_size)

    library = ModuleType("mamba_ssm.ops.triton.ssd_combined")
    vars(library)["mamba_chunk_scan_combined"] = scan
    monkeypatch.setitem(sys.modules, library.__name__, library)
    tokens, heads = drawn((3, 6))
    for documents in ((9,), (3, 6)):
        got = ssd(tokens, heads, documents, backend="mamba")
        torch.testing.assert_close(got, ssd(tokens, heads, documents), rtol=0, atol=1e-5)  # rates there are fp32
    assert seen["seq_idx"].tolist() == [[0] * 3 + [1] * 6] * 2


def test_a_cpu_takes_torch() -> None:
    assert default_backend(torch.ones(1, dtype=torch.bfloat16)) == "torch"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "mamba"])
@pytest.mark.parametrize("documents", [(256,), (100, 156)], ids=str)
def test_half_precision_on_a_gpu(backend: str, documents: tuple[int, ...]) -> None:
    if backend == "mamba":
        pytest.importorskip("mamba_ssm")
    exact, heads = drawn(documents)
    rounded = (x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in (exact.value, exact.key, exact.query))
    value, key, query = rounded
    step = (0.05 * exact.time_step.detach()).to("cuda", torch.float32).requires_grad_()
    of_heads = SsdHeads(*(x.detach().to("cuda", torch.float32).requires_grad_() for x in heads))
    out = ssd(SsdTokens(value, step, key, query), of_heads, documents, chunk_size=64, backend=backend)
    expected = ssd(
        SsdTokens(*(x.double() for x in (value, step, key, query))), of_heads, documents, backend="reference"
    )
    # Products of bf16 numbers, summed over a few hundred tokens.
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    wanted = (value, step, key, query, *of_heads)
    grads, others = (torch.autograd.grad(one.sum(), wanted) for one in (out, expected))
    for one, other in zip(grads, others, strict=True):
        scale = float(other.double().abs().max())
        torch.testing.assert_close(one.double(), other.double(), rtol=3e-2, atol=3e-2 * scale)
