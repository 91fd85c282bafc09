"""Pipelines of every layout against one process, in float64; and the boundaries between stages."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moeplan.executor.mesh import Group
from moeplan.executor.micro_batch import NO_TARGET, cut_micro_batch, loss_weights
from moeplan.executor.model import embedding_holders
from moeplan.executor.pipeline import Pipeline
from moeplan.pipeline_order import ChunkStep
from moeplan.plan import Plan
from tests.executor.cases import build_trainer, tiny_plan
from tests.executor.folding_cases import GQA, MLA, RUN, alone, assert_same_run, train_folded
from tests.executor.gloo_pool import GlooPool, gloo_pool

PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "1F1B of four stages": ("gqa", {"pp": 4}),
    "two stages, experts over two": ("windowed", {"pp": 2, "ep": 2}),
    "interleaved, uneven": ("gqa", {"pp": 2, "vp": 2, "tp": 2, "ep": 2, "layout": "E|tt|t|tmL"}),
    "MTP on stages of its own, tied": ("mla", {"pp": 4, "layout": "Ett|tt|mm|L"}),
    "stages of nothing, one of each MTP layer": ("mla", {"pp": 2, "vp": 3, "layout": "Et|tt||tm|m|L"}),
    "MTP beside the embedding": ("mla", {"pp": 2, "vp": 2, "layout": "Et|tt|tm|mL"}),
    "long groups": ("gqa", {"pp": 2, "vp": 2, "micro_batch_group_size": 4, "etp": 2}),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(4, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_equals_one_process(pool: GlooPool, name: str) -> None:
    model, changes = PIPELINES[name]
    assert_same_run(alone(model), pool.run(train_folded, model, 4, changes))


class ForwardsFirst(Pipeline):
    """Every stage runs all its forwards before its first backward."""

    def _order(self, rank: int) -> tuple[ChunkStep, ...]:
        return tuple(sorted(super()._order(rank), key=lambda step: step.kind == "B"))


def reordered(rank: int, plan: Plan) -> list[float]:
    """Losses of two steps in that order."""
    trainer = build_trainer(rank, plan, RUN)
    trainer.pipeline = ForwardsFirst(plan, trainer.mesh, trainer.model, trainer.pipeline.shape)
    return [trainer.step(number).loss for number in range(2)]


def test_another_order_of_chunks_neither_deadlocks_nor_changes_the_loss(pool: GlooPool) -> None:
    plan = tiny_plan(GQA, 4, pp=2, vp=2)
    for losses in pool.run(reordered, plan):
        torch.testing.assert_close(losses, alone("gqa").losses[:2], rtol=0, atol=1e-12)


def test_who_holds_the_embedding() -> None:
    assert embedding_holders(tiny_plan(GQA, 4, pp=4, layout="Et|tt|t|mL")) == (0, 3)
    assert embedding_holders(tiny_plan(GQA, 4, pp=4, layout="Ett|t|tm|L")) == (0, 2)
    assert embedding_holders(tiny_plan(MLA, 4, pp=4, layout="Ett|t|tmm|L")) == (0, 2, 3)


def test_each_depth_reads_and_predicts_one_further_on() -> None:
    plan = tiny_plan(MLA, 1, seq_len=4, mbs=2)
    ids = torch.arange(10).view(2, 5)
    batch = cut_micro_batch(ids[:, :-1].flatten(), ids[:, 1:].flatten(), plan, Group((0,), 0, None))
    assert [depth.tolist() for depth in batch.tokens] == [
        [0, 1, 2, 3, 5, 6, 7, 8],
        [1, 2, 3, 4, 6, 7, 8, 9],
        [2, 3, 4, 0, 7, 8, 9, 0],
    ]
    none = NO_TARGET
    assert [depth.tolist() for depth in batch.targets] == [
        [1, 2, 3, 4, 6, 7, 8, 9],
        [2, 3, 4, none, 7, 8, 9, none],
        [3, 4, none, none, 8, 9, none, none],
    ]
    # 8 sequences of 4 tokens, of which 3 and 2 have a target; the scaling factor 0.1 is shared by two layers.
    assert loss_weights(plan) == pytest.approx((1 / 32, 0.05 / 24, 0.05 / 16))
