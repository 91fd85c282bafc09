"""Packs of dynamic context parallelism: every token once, groups that exist, and ranks as equal as documents allow."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.cp_schedule import (
    KNEE_FRAC,
    Filler,
    FlopCost,
    RankPack,
    flop_schedule,
    largest_group,
    padded_length,
    placed,
    ring_tokens,
    step_cost,
)
from moeplan.flops import training_flops_per_token
from moeplan.presets import load_model

MODEL = load_model("tiny-moe")
COST = FlopCost.of(MODEL)
MAX_TOKENS = 64
lengths_of = st.lists(st.integers(1, MAX_TOKENS * 4), min_size=1, max_size=30)


def filler(num_ranks: int, tp: int = 1) -> Filler:
    return Filler(COST, num_ranks, largest_group(num_ranks), MAX_TOKENS, tp)


@pytest.mark.parametrize("name", ["tiny-moe", "gpt-oss-20b", "deepseek-v3"])
@pytest.mark.parametrize("length", [1, 100, 5000])
def test_work_is_the_model_flops_of_the_document(name: str, length: int) -> None:
    model = load_model(name)
    expected = training_flops_per_token(model, length) * length
    assert FlopCost.of(model).work(length) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(lengths_of, st.integers(4, 9), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
def test_every_document_is_on_ranks_that_share_a_group(lengths: list[int], num_ranks: int, tp: int, pp: int) -> None:
    batches = flop_schedule(filler(num_ranks, tp), lengths, pp)
    placed_batches = placed(batches, lengths)
    assert Counter(one for batch in placed_batches for pack in batch for one in pack.documents) == Counter(
        range(len(lengths))
    )
    for batch in placed_batches:
        taken = [rank for pack in batch for rank in range(pack.first_rank, pack.first_rank + pack.num_ranks)]
        assert len(set(taken)) == len(taken)
        assert max(taken) < num_ranks
        for pack in batch:
            assert pack.num_ranks.bit_count() == 1
            assert pack.first_rank % pack.num_ranks == 0
            tokens = sum(padded_length(lengths[document], pack.num_ranks, tp) for document in pack.documents)
            assert tokens <= pack.num_ranks * MAX_TOKENS
            assert tokens % (pack.num_ranks * tp) == 0


def with_one_more(pack: RankPack, length: int, fill: Filler) -> float:
    """FLOPs of each rank of the pack with a further document; infinite where memory does not hold it."""
    lengths = (*pack.lengths, length)
    tokens = sum(padded_length(one, pack.num_ranks, fill.tp) for one in lengths)
    if tokens > pack.num_ranks * fill.max_tokens:
        return float("inf")
    return COST.pack(tokens, sum(COST.attention(one, pack.num_ranks) for one in lengths), pack.num_ranks)


@settings(max_examples=25, deadline=None)
@given(lengths_of, st.integers(4, 9), st.floats(0.2, 3))
def test_ranks_differ_by_less_than_a_document(lengths: list[int], num_ranks: int, aim: float) -> None:
    """The bound: no pack has more FLOPs a rank than the target, or than the step's heaviest document on the best group.

    And none has so few that a document of a later micro-batch would have fitted beside what it holds.
    """
    fill = filler(num_ranks)
    target = aim * sum(map(COST.work, lengths)) / num_ranks
    batches = list(fill.fill(lengths, target))
    for index, batch in enumerate(batches):
        heaviest = max(length for pack in batch.packs for length in pack.lengths)
        alone = min(
            COST.pack(padded_length(heaviest, size), COST.attention(heaviest, size), size)
            for size in (1, 2, 4, 8)
            if size <= fill.largest and padded_length(heaviest, size) <= size * MAX_TOKENS
        )
        limit = max(target, alone)
        assert batch.cost <= limit * (1 + 1e-12)
        for later in (length for other in batches[index + 1 :] for pack in other.packs for length in pack.lengths):
            assert all(with_one_more(pack, later, fill) > limit * (1 - 1e-12) for pack in batch.packs)


@settings(max_examples=25, deadline=None)
@given(lengths_of, st.sampled_from([4, 8]), st.sampled_from([1, 4]))
def test_short_rings_near_the_fewest_flops(lengths: list[int], num_ranks: int, pp: int) -> None:
    fill = filler(num_ranks)
    chosen, swept = flop_schedule(fill, lengths, pp), list(fill.sweep(lengths, pp))
    least = min(step_cost(one, pp) for one in swept)
    assert step_cost(chosen, pp) <= least * (1 + KNEE_FRAC)
    assert ring_tokens(chosen) <= min(ring_tokens(one) for one in swept if step_cost(one, pp) == least)


def test_equal_documents_leave_no_rank_waiting() -> None:
    batches = flop_schedule(filler(8), [MAX_TOKENS // 2] * 64, 1)
    assert len(batches) == 4
    assert {pack.lengths for one in batches for pack in one.packs} == {(MAX_TOKENS // 2,) * 2}
