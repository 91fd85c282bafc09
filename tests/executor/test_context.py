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

from moeplan.executor.attention import core_attention, window_mask
from moeplan.executor.context import Core, GatheredAttention, HeadSplitAttention, gathered_order, own_positions
from moeplan.executor.mesh import Group, build_mesh
from moeplan.executor.ring import RingAttention
from moeplan.folding import Folding
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


@given(cp=st.integers(2, 8), chunk=st.integers(1, 5))
def test_ranks_share_positions_and_causal_work_equally(cp: int, chunk: int) -> None:
    seq_len = 2 * cp * chunk
    held = [own_positions(seq_len, Group(tuple(range(cp)), index, None), CPU) for index in range(cp)]
    assert sorted(torch.cat(held).tolist()) == list(range(seq_len))
    assert len({int((positions + 1).sum()) for positions in held}) == 1, "a query at p sees p + 1 keys"
    order = gathered_order(seq_len, Group(tuple(range(cp)), 0, None), CPU)
    assert torch.cat(held)[order].tolist() == list(range(seq_len))


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and a gradient of two whole sequences; values are narrower than keys."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, SEQ_LEN, 4, 8), (2, SEQ_LEN, 2, 8), (2, SEQ_LEN, 2, 6), (2, SEQ_LEN, 4, 6))
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return q, k, v, grad


def attention_of(kind: str, window: int | None, group: Group) -> Core:
    mask_SS = window_mask(SEQ_LEN, window, CPU) if window else None
    kinds: dict[str, Core] = {
        "gather": GatheredAttention(SEQ_LEN, window, group, CPU),
        "ring": RingAttention(group),
        "heads": HeadSplitAttention(SEQ_LEN, partial(core_attention, mask_SS=mask_SS), group, CPU),
    }
    return kinds[kind]


def attend_part(rank: int, cp: int, kind: str, window: int | None) -> tuple[Tensor, ...]:
    """This rank's output and gradients of queries, keys and values."""
    group = build_mesh(Folding(4, cp=cp), rank).cp
    positions = own_positions(SEQ_LEN, group, CPU)
    q, k, v, grad = (whole[:, positions] for whole in inputs())
    leaves = tuple(part.requires_grad_() for part in (q, k, v))
    out = attention_of(kind, window, group)(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


@pytest.mark.parametrize(
    "cp, kind, window",
    [
        (4, "gather", None),
        (4, "gather", 1),
        (4, "gather", 5),
        (4, "ring", None),
        (2, "ring", None),
        (2, "heads", None),
        (2, "heads", 5),
    ],
)
def test_attention_across_ranks_and_its_gradients(pool: GlooPool, cp: int, kind: str, window: int | None) -> None:
    q, k, v, grad = inputs()
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    out = core_attention(q, k, v, window_mask(SEQ_LEN, window, CPU) if window else None)
    expected = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    for rank, parts in enumerate(pool.run(attend_part, cp, kind, window)):
        positions = own_positions(SEQ_LEN, Group(tuple(range(cp)), rank % cp, None), CPU)
        for part, whole in zip(parts, expected, strict=True):
            torch.testing.assert_close(part, whole[:, positions], rtol=0, atol=1e-12)


def test_the_executor_leaves_torchs_compiler_out() -> None:
    """It would take 145 MiB of every process."""
    code = "import sys, moeplan.executor.worker; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
