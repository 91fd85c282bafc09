"""Orders of 1F1B and interleaved 1F1B."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import InvalidInputError
from moeplan.pipeline_order import PairedStep, num_warmup_forwards, paired_order, rank_order

shapes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 20)).map(
    lambda drawn: (drawn[0], drawn[1] if drawn[0] > 1 else 1, drawn[0] * (1 + drawn[2] // 4))
)


@given(shapes)
def test_every_chunk_runs_forward_then_backward_once(shape: tuple[int, int, int]) -> None:
    pp, vp, num_micro_batches = shape
    for rank in range(pp):
        order = rank_order(pp, vp, num_micro_batches, rank)
        forwards = [step[1:] for step in order if step.kind == "F"]
        backwards = [step[1:] for step in order if step.kind == "B"]
        assert sorted(forwards) == sorted(backwards) == [(c, m) for c in range(vp) for m in range(num_micro_batches)]
        assert all(order.index(("F", *chunk)) < order.index(("B", *chunk)) for chunk in forwards)


@pytest.mark.parametrize("rank", range(4))
def test_chunks_in_flight_are_those_of_the_report(rank: int) -> None:
    """Report section 1.5: warm-up + 1 = 2(P-r-1) + (V-1)G + 1 chunks."""
    in_flight = peak = 0
    for step in rank_order(4, 4, 128, rank):
        in_flight += 1 if step.kind == "F" else -1
        peak = max(peak, in_flight)
    assert peak == num_warmup_forwards(4, 4, 128, 4, rank) + 1 == 2 * (3 - rank) + 12 + 1


def test_plain_1f1b_of_two_ranks() -> None:
    written = "".join(f"{step.kind}{step.micro_batch}" for step in rank_order(2, 1, 3, 0))
    assert written == "F0F1B0F2B1B2"


@pytest.mark.parametrize(
    "pp, vp, num_micro_batches",
    [(1, 2, 4), (4, 2, 3), (4, 2, 6), (2, 1, 0)],
)
def test_orders_that_do_not_exist_are_refused(pp: int, vp: int, num_micro_batches: int) -> None:
    with pytest.raises(InvalidInputError):
        rank_order(pp, vp, num_micro_batches, 0)


def test_without_a_pipeline_the_first_forward_and_the_last_backward_are_alone() -> None:
    written = [
        "".join(f"{step.kind}{step.micro_batch}" for step in pair if step is not None)
        for pair in paired_order(1, 1, 4, 0)
    ]
    assert written == ["F0", "F1B0", "F2B1", "F3B2", "B3"]


@given(shapes)
def test_pairs_hold_the_steps_of_the_plain_order_and_one_more_warm_up(shape: tuple[int, int, int]) -> None:
    pp, vp, num_micro_batches = shape
    for rank in range(pp):
        plain, pairs = rank_order(pp, vp, num_micro_batches, rank), paired_order(pp, vp, num_micro_batches, rank)
        for place, kind in ((0, "F"), (1, "B")):
            steps = [pair[place] for pair in pairs if pair[place] is not None]
            assert steps == [step for step in plain if step.kind == kind]
        alone = next(place for place, pair in enumerate(pairs) if pair.backward is not None)
        total = num_micro_batches * vp
        assert alone == min(total, num_warmup_forwards(pp, vp, num_micro_batches, pp, rank) + 1)
        assert all(pair.forward is not None and pair.backward is not None for pair in pairs[alone:total])


@given(shapes, st.integers(0, 3))
def test_pairs_of_interleaved_stages_never_wait_for_each_other(shape: tuple[int, int, int], longer: int) -> None:
    """Both halves of a pair start together, when what both need has been made on other ranks."""
    pp, vp, num_micro_batches = shape[0], max(2, shape[1]) if shape[0] > 1 else 1, shape[2]
    group = min(pp + longer, num_micro_batches)
    if 0 < num_micro_batches % group < pp:
        group = pp
    left = [list(paired_order(pp, vp, num_micro_batches, rank, group)) for rank in range(pp)]
    made: set[tuple[str, int, int]] = set()

    def needs(pair: PairedStep, rank: int) -> set[tuple[str, int, int]]:
        found: set[tuple[str, int, int]] = set()
        for step in pair:
            if step is None:
                continue
            stage = step.chunk * pp + rank
            if step.kind == "F" and stage:
                found.add(("F", stage - 1, step.micro_batch))
            if step.kind == "B":
                found.add(("F", stage, step.micro_batch))
                if stage < pp * vp - 1:
                    found.add(("B", stage + 1, step.micro_batch))
        return found

    while any(left):
        ready = [rank for rank in range(pp) if left[rank] and needs(left[rank][0], rank) <= made]
        assert ready, "the ranks wait for each other"
        for rank in ready:
            made |= {(s.kind, s.chunk * pp + rank, s.micro_batch) for s in left[rank].pop(0) if s is not None}
