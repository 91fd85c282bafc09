"""Context parallelism: who holds which positions, and attention over all of them against one process."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from moeplan.executor.attention import whole_attention
from moeplan.executor.context import (
    Core,
    Documents,
    context_attention,
    document_positions,
    gathered_order,
    own_positions,
)
from moeplan.executor.mesh import Group, plan_mesh
from moeplan.plan import Plan
from tests.executor.cases import DENSE_MODEL, tiny_plan
from tests.executor.folding_cases import alone, assert_same_run, train_folded
from tests.executor.gloo_pool import GlooPool, gloo_pool

CPU = torch.device("cpu")
SEQ_LEN = 16
FOLDINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "cp4": ("gqa", {"cp": 4}),
    "cp4 gathered": ("gqa", {"cp": 4, "cp_comm": "all_gather"}),
    "cp2 with heads split, windows": ("windowed", {"cp": 2, "cp_comm": "a2a"}),
    "cp2 tp2, experts over all, two sequences a micro-batch": ("gqa", {"cp": 2, "tp": 2, "ep": 4, "mbs": 2}),
    "cp2 pp2": ("mla", {"cp": 2, "pp": 2, "etp": 2}),
    "cp2 with windows and recompute": ("windowed", {"cp": 2, "ep": 2, "recompute": ("core_attn",)}),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(4, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


@pytest.mark.parametrize("name", FOLDINGS)
def test_context_parallel_equals_one_process(pool: GlooPool, name: str) -> None:
    model, changes = FOLDINGS[name]
    expected = alone(model, changes.get("mbs", 1))
    assert_same_run(expected, pool.run(train_folded, model, 4, changes))


@given(cp=st.integers(2, 8), chunks=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_ranks_share_positions_and_causal_work_equally(cp: int, chunks: list[int]) -> None:
    documents = tuple(2 * cp * chunk for chunk in chunks)
    groups = [Group(tuple(range(cp)), index, None) for index in range(cp)]
    held = [own_positions(documents, group, CPU) for group in groups]
    assert sorted(torch.cat(held).tolist()) == list(range(sum(documents)))
    inside = [document_positions(documents, group, CPU) for group in groups]
    assert len({int((positions + 1).sum()) for positions in inside}) == 1, "a query at p sees p + 1 keys"
    starts = torch.tensor([sum(documents[:index]) for index in range(len(documents))]).repeat_interleave(
        torch.tensor(documents)
    )
    for places, positions in zip(held, inside, strict=True):
        assert torch.equal(places - starts[places], positions)
    order = gathered_order(documents, groups[0], CPU)
    assert torch.cat(held)[order].tolist() == list(range(sum(documents)))


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and a gradient of two whole sequences; values are narrower than keys."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, SEQ_LEN, 4, 8), (2, SEQ_LEN, 2, 8), (2, SEQ_LEN, 2, 6), (2, SEQ_LEN, 4, 6))
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return q, k, v, grad


# How ranks attend together, and how many of them split heads.
KINDS: dict[str, dict[str, int]] = {"p2p": {}, "all_gather": {}, "a2a": {}, "a2a+p2p": {"cp_a2a_size": 2}}


def plan_of(cp: int, kind: str, documents: Documents) -> Plan:
    """Of four ranks, so that those of a smaller cp group are there twice."""
    packed = documents if len(documents) > 1 else ()
    return tiny_plan(DENSE_MODEL, 4, cp=cp, cp_comm=kind, packed_lengths=packed, **KINDS[kind])


def attend_part(rank: int, plan: Plan, window: int | None, sinks: Tensor | None) -> tuple[Tensor, ...]:
    """This rank's output and gradients of queries, keys and values; with ``sinks``, of those as well."""
    mesh = plan_mesh(plan, rank)
    positions = own_positions(plan.documents, mesh.cp, CPU)
    q, k, v, grad = (whole[:, positions] for whole in inputs())
    attend = context_attention(plan, window, partial(whole_attention, plan.documents, window, CPU), mesh, CPU)
    return attended(attend, (q, k, v), sinks, grad)


def attended(attend: Core, inputs: tuple[Tensor, ...], sinks: Tensor | None, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [part.clone().requires_grad_() for part in inputs]
    by_name = {}
    if sinks is not None:
        by_name["sinks_N"] = sinks.clone().requires_grad_()
    out = attend(*leaves, **by_name)
    leaves += by_name.values()
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def masked_reference(documents: Documents, window: int | None) -> Core:
    """Scores of all pairs, of which those in one document count, and of those the last ``window`` keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        owner = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
        distance = torch.arange(SEQ_LEN)[:, None] - torch.arange(SEQ_LEN)
        seen = (owner[:, None] == owner) & (distance >= 0) & (distance < (window or SEQ_LEN))
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) / q.shape[3] ** 0.5
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks_N is not None:
            scores = torch.cat([scores, sinks_N[:, None, None].expand(*scores.shape[:3], 1)], 3)
        return torch.einsum("bnqk,bknd->bqnd", scores.softmax(3)[..., :SEQ_LEN], v)

    return attend


@pytest.mark.parametrize("documents", [(16,), (8, 8)])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    "cp, kind, window",
    [
        (4, "all_gather", None),
        (4, "all_gather", 1),
        (4, "all_gather", 5),
        (4, "p2p", None),
        (2, "p2p", None),
        (2, "a2a", None),
        (2, "a2a", 5),
        (4, "a2a+p2p", None),
        (4, "a2a+p2p", 5),
    ],
)
def test_attention_across_ranks_and_its_gradients(  # noqa: PLR0917 - one parameter an axis
    pool: GlooPool, cp: int, kind: str, window: int | None, has_sinks: bool, documents: Documents
) -> None:
    q, k, v, grad = inputs()
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64) if has_sinks else None
    expected = attended(masked_reference(documents, window), (q, k, v), sinks, grad)
    results = pool.run(attend_part, plan_of(cp, kind, documents), window, sinks)
    for rank, parts in enumerate(results):
        positions = own_positions(documents, Group(tuple(range(cp)), rank % cp, None), CPU)
        for part, whole in zip(parts[:4], expected[:4], strict=True):
            torch.testing.assert_close(part, whole[:, positions], rtol=0, atol=1e-12)
    for shares in zip(*(parts[4:] for parts in results), strict=True):  # sinks: sums over the ranks of each cp group
        torch.testing.assert_close(sum(shares) * cp / 4, expected[4], rtol=0, atol=1e-12)


@pytest.mark.parametrize("documents", [(16,), (3, 1, 12), (8, 8)])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_inside_documents_and_its_gradients(
    documents: Documents, window: int | None, has_sinks: bool
) -> None:
    q, k, v, grad = inputs()
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64) if has_sinks else None
    expected = attended(masked_reference(documents, window), (q, k, v), sinks, grad)
    for part, whole in zip(
        attended(whole_attention(documents, window, CPU), (q, k, v), sinks, grad), expected, strict=True
    ):
        torch.testing.assert_close(part, whole, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_inside_documents_on_a_gpu(window: int | None, has_sinks: bool) -> None:
    documents, device = (3, 1, 12), torch.device("cuda")
    q, k, v, grad = (x.bfloat16() for x in inputs())
    v, grad = F.pad(v, (0, 2)), F.pad(grad, (0, 2))
    sinks = torch.linspace(-1, 1, 4).bfloat16() if has_sinks else None
    wide = (q.double(), k.double(), v.double()), None if sinks is None else sinks.double(), grad.double()
    expected = attended(masked_reference(documents, window), *wide)
    here = (q.cuda(), k.cuda(), v.cuda()), None if sinks is None else sinks.cuda(), grad.cuda()
    for part, whole in zip(attended(whole_attention(documents, window, device), *here), expected, strict=True):
        torch.testing.assert_close(part.cpu().double(), whole, rtol=0, atol=0.02 * float(whole.abs().max()))


def test_the_executor_leaves_torchs_compiler_out() -> None:
    """It would take 145 MiB of every process."""
    code = "import sys, moeplan.executor.worker; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
