"""Blocks of hybrid sharding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.executor.copies import shard_ranks
from moeplan.folding import Folding
from moeplan.legality import violations
from tests.executor.cases import GQA_MODEL, tiny_plan


@given(
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
)
def test_dense_and_expert_blocks_are_the_same_ranks(tp: int, cp: int, pp: int, ep: int, number: int) -> None:
    folding = Folding(32, tp=tp, cp=cp, pp=pp, ep=ep)
    blocks = []
    for grid, axes in (("attention", ("cp", "dp")), ("expert", ("edp",))):
        shards, replicas = shard_ranks(folding, grid, axes, number)  # type: ignore[arg-type]
        for groups in (shards, replicas):
            assert sorted(rank for ranks in groups for rank in ranks) == list(range(32))
        assert all(len(ranks) == number for ranks in replicas)
        size = 32 // pp // number
        assert all(len({rank // size for rank in ranks}) == 1 for ranks in shards)
        assert all(len({rank // size for rank in ranks}) == number for ranks in replicas)
        blocks.append({rank: rank // size for ranks in shards for rank in ranks})
    assert blocks[0] == blocks[1]


def test_two_blocks_of_four_ranks() -> None:
    shards, replicas = shard_ranks(Folding(8, tp=2), "attention", ("cp", "dp"), 2)
    assert shards == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert replicas == [(0, 4), (2, 6), (1, 5), (3, 7)]


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"sharding": "none", "dp_replicate": 2}, "with sharding none"),
        ({"dp_replicate": 3}, "does not divide dp 4"),
        ({"dp_replicate": 2, "ep": 4}, "does not divide edp 1"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        tiny_plan(GQA_MODEL, 4, **changes)


def test_one_block_breaks_no_rule() -> None:
    plan = tiny_plan(GQA_MODEL, 4, ep=4)
    assert not list(violations(plan.model, plan.point))
    assert "dp_replicate" not in plan.model_dump(exclude_defaults=True)
