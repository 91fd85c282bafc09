"""In-flight chunks: the report's counts, and the shortened walk against the whole schedule."""

from itertools import accumulate

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moeplan.errors import InvalidInputError
from moeplan.pipeline_order import rank_order, schedule_problem
from moeplan.simulator.in_flight import peak_counts


def largest(counts: tuple[tuple[int, ...], ...]) -> int:
    return max(sum(state) for state in counts)


def test_counts_of_the_report() -> None:
    """Report section 1.5: warm-up 2(P-r-1) + (V-1)G, and one more chunk; P = V = 4 gives 19 chunks on rank 0."""
    assert [largest(rank) for rank in peak_counts(4, 4, 128, None)] == [19, 17, 15, 13]
    assert [largest(rank) for rank in peak_counts(8, 1, 128, None)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [largest(rank) for rank in peak_counts(8, 1, 3, None)] == [3, 3, 3, 3, 3, 3, 2, 1]
    assert peak_counts(1, 1, 4096, None) == (((1,),),)


def test_running_ahead_holds_one_chunk_more() -> None:
    """Report section 1.5, EP overlap: the forward beside a backward has begun; never more than all chunks."""
    assert [largest(rank) for rank in peak_counts(4, 4, 128, None, runs_ahead=True)] == [20, 18, 16, 14]
    assert [largest(rank) for rank in peak_counts(4, 2, 4, None, runs_ahead=True)] == [8, 8, 8, 6]


def test_count_never_exceeds_all_chunks() -> None:
    assert [largest(rank) for rank in peak_counts(4, 2, 4, None)] == [8, 8, 7, 5]


@given(data=st.data(), pp=st.integers(1, 6), vp=st.integers(1, 4), num_micro_batches=st.integers(1, 70))
def test_shortened_walk_finds_the_peak_of_the_whole_schedule(
    data: st.DataObject, pp: int, vp: int, num_micro_batches: int
) -> None:
    group = data.draw(st.one_of(st.none(), st.integers(pp, 12)))
    assume(not schedule_problem(pp, vp, num_micro_batches, group or pp))
    chunk_bytes = data.draw(st.lists(st.integers(0, 9), min_size=vp, max_size=vp))
    for rank, states in enumerate(peak_counts(pp, vp, num_micro_batches, group)):
        found = max(sum(count * size for count, size in zip(state, chunk_bytes, strict=True)) for state in states)
        steps = rank_order(pp, vp, num_micro_batches, rank, group)
        held = accumulate(chunk_bytes[step.chunk] * (1 if step.kind == "F" else -1) for step in steps)
        assert found == max(held)


def test_schedule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least pp 4 micro-batches, got 2"):
        peak_counts(4, 2, 2, None)
