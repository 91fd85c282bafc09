"""Pages: none is had twice, rows come back as they were, and training does not notice."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.executor.mesh import build_mesh
from moeplan.executor.model import Transformer
from moeplan.executor.moe import Experts
from moeplan.executor.paged_stash import PAGE_ROWS, PagedStash, PagePool, layers_in_flight
from moeplan.folding import Folding
from moeplan.simulator.in_flight import peak_counts
from tests.executor.cases import GQA_MODEL, tiny_plan
from tests.executor.folding_cases import alone, assert_same_run, train_folded
from tests.executor.pools import Pools

CPU = torch.device("cpu")


@given(steps=st.lists(st.integers(-3, 4), max_size=40))
def test_pages_are_had_once(steps: list[int]) -> None:
    """Positive: take so many pages; negative: give back what was taken that many takes ago."""
    pool, had = PagePool(6, 1, torch.float32, CPU), list[torch.Tensor]()
    for step in steps:
        if step > 0:
            pages = pool.take(step)
            assert (pages is None) == (step > 6 - sum(map(len, had)))
            had += [] if pages is None else [pages]
        elif had:
            pool.give_back(had.pop(step % len(had)))
        numbers = [int(page) for pages in had for page in pages]
        assert len(set(numbers)) == len(numbers)
        assert pool.num_free == 6 - len(numbers)
        assert set(numbers) <= set(range(6))


def test_rows_come_back_and_pages_are_free_after_backward() -> None:
    stash = PagedStash(3 * PAGE_ROWS, (4,), CPU)
    x = torch.randn(100, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    with stash.holding(100):
        y = (x * 1.0).mm(weight).exp()
    (pool,) = stash.pools.values()
    assert pool.num_free == 1, "the input of mm; no page is left for the result of exp"
    assert stash.num_spilled == 1
    y.sum().backward()
    assert pool.num_free == 3
    expected = torch.autograd.grad((x * 1.0).mm(weight).exp().sum(), (x, weight))
    torch.testing.assert_close((x.grad, weight.grad), expected, rtol=0, atol=0)


def test_other_shapes_stay() -> None:
    stash = PagedStash(640, (4,), CPU)
    x = torch.randn(10, 4, requires_grad=True)
    with stash.holding(11):
        x.exp().sum().backward()
    with stash.holding(10):
        (x.exp()[:, ::2] ** 2).sum().backward()
    assert stash.num_spilled == 0
    assert all(pool.num_free == 10 for pool in stash.pools.values())


@pytest.mark.parametrize("changes", [{}, {"pp": 2}, {"pp": 2, "vp": 2}, {"pp": 4, "mbs": 2}])
def test_layers_in_flight_are_those_of_the_simulator(changes: dict[str, Any]) -> None:
    plan = tiny_plan(GQA_MODEL.model_copy(update={"num_layers": 8, "num_dense_layers": 1}), 4, ep=1, **changes)
    counts = peak_counts(plan.pp, plan.vp, plan.num_micro_batches, plan.micro_batch_group_size)
    kinds = plan.model.layer_kinds
    for rank in range(plan.pp):
        stages = plan.pipeline.stages_of_rank(plan.pp, rank)
        sizes = [sum(kinds[layer].mlp == "moe" for layer in stage.layers) for stage in stages]
        most = max(sum(size * num for size, num in zip(sizes, state, strict=True)) for state in counts[rank])
        assert layers_in_flight(plan, rank) == most


def test_kept_rows_of_experts_are_in_pages() -> None:
    plan = tiny_plan(GQA_MODEL, 1, precision="fp32", paged_stash_factor=1.1)
    model = Transformer(plan, build_mesh(Folding(1), 0), seed=1, device=CPU)
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    ids = torch.arange(16)[None]
    loss = model(ids, ids)
    assert experts.stash is not None
    pools = experts.stash.pools  # of width 32: rows and both halves of FC1's output; of 16: the activation's
    assert {width: pool.num_free for (width, _), pool in pools.items()} == {32: 0, 16: 0}
    loss.backward()
    assert {width: pool.num_free for (width, _), pool in pools.items()} == {32: 2, 16: 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"ep": 2, "paged_stash_factor": 1.1},
        {"pp": 2, "paged_stash_factor": 0.5, "recompute": ("moe_act",)},
        {"ep": 2, "paged_stash_factor": 2.0, "echo_slots": 1, "memory_efficient_permutation": False},
    ],
)
def test_training_does_not_notice(pools: Pools, changes: dict[str, Any]) -> None:
    assert_same_run(alone("gqa", 1), pools[2].run(train_folded, "gqa", 2, changes))
