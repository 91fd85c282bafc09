"""ECHO's planner: small cases by hand, and what holds for all counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.echo import Clone, EchoPlan, echo_plan


def loads(counts: list[list[int]], plan: EchoPlan) -> list[int]:
    """Tokens of every rank's experts and clones."""
    total = [sum(column) for column in zip(*counts, strict=True)]
    num_local = plan.num_local
    ranks = [sum(total[first : first + num_local]) for first in range(0, len(total), num_local)]
    for clone in plan.clones:
        ranks[clone.expert // num_local] -= clone.num_tokens
        ranks[clone.rank] += clone.num_tokens
    return ranks


def test_one_hot_expert_spills_to_the_emptiest_ranks() -> None:
    counts = [[10, 0, 0, 2], [10, 0, 4, 2], [10, 0, 0, 0], [10, 0, 0, 0]]  # loads 40, 0, 4, 4; mean 12
    plan = echo_plan(counts, len(counts), 1)
    assert plan.clones == (
        Clone(0, 1, 0, (3, 3, 3, 3)),
        Clone(0, 2, 0, (2, 2, 2, 2)),
        Clone(0, 3, 0, (2, 2, 2, 2)),
    )
    assert loads(counts, plan) == [12, 12, 12, 12]


def test_small_experts_stay_whole() -> None:
    """Rank 0 holds 2, 3 and 15 with a mean of 10: only the largest spills."""
    plan = echo_plan([[2, 3, 15, 0, 0, 0], [0] * 6], 2, 1)
    assert [(clone.expert, clone.num_tokens) for clone in plan.clones] == [(2, 10)]


def test_several_slots_keep_the_largest_pieces() -> None:
    counts = [[9, 8, 7, 0, 0, 0, 0, 0, 0], [0] * 9, [0] * 9]  # spills: 8 of 24 stay, 9, 7 leave
    plan = echo_plan(counts, len(counts), 2)
    assert loads(counts, plan) == [8, 8, 8]
    assert max(clone.slot for clone in plan.clones) == 1
    assert all(len({clone.slot for clone in plan.clones if clone.rank == rank}) <= 2 for rank in (1, 2))


def test_balanced_counts_need_no_clone() -> None:
    assert echo_plan([[3, 3], [3, 3]], 2, 1).clones == ()
    assert echo_plan([[0, 0], [0, 0]], 2, 2).clones == ()


def test_numbers_put_spare_slots_behind_each_rank() -> None:
    plan = EchoPlan(2, 1, (Clone(0, 1, 0, (1, 0)),))
    assert [plan.home_id(expert) for expert in range(4)] == [0, 1, 3, 4]
    assert plan.clone_id(plan.clones[0]) == 5


@st.composite
def routed(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    num_ranks, num_local = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 50), min_size=num_ranks * num_local, max_size=num_ranks * num_local)
    return draw(st.lists(row, min_size=num_ranks, max_size=num_ranks)), draw(st.integers(1, 3))


@given(case=routed())
def test_no_rank_gets_more_than_before_or_the_mean(case: tuple[list[list[int]], int]) -> None:
    counts, num_slots = case
    plan = echo_plan(counts, len(counts), num_slots)
    before, after = loads(counts, EchoPlan(plan.num_local, num_slots, ())), loads(counts, plan)
    mean = sum(before) // len(before)
    assert sum(after) == sum(before)
    for old, new in zip(before, after, strict=True):
        assert min(old, mean) <= new <= max(old, mean)
    assert max(after) <= max(before)


@given(case=routed())
def test_sources_give_what_they_have_and_slots_hold_one_clone(case: tuple[list[list[int]], int]) -> None:
    counts, num_slots = case
    plan = echo_plan(counts, len(counts), num_slots)
    places = [(clone.rank, clone.slot) for clone in plan.clones]
    assert len(set(places)) == len(places)
    assert all(slot < num_slots for _, slot in places)
    for expert in range(len(counts[0])):
        for source, row in enumerate(counts):
            assert sum(clone.taken[source] for clone in plan.clones if clone.expert == expert) <= row[expert]
    assert all(clone.num_tokens > 0 for clone in plan.clones)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_enough_slots_level_the_load(num_slots: int) -> None:
    """One hot expert of 64 ranks: every other rank takes its share of it."""
    counts = [[64 if expert == 5 else 1 for expert in range(64)] for _ in range(64)]
    plan = echo_plan(counts, len(counts), num_slots)
    assert max(loads(counts, plan)) <= 127 * 64 // 64
