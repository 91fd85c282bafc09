"""Orders of 1F1B and interleaved 1F1B."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import InvalidInputError
from moeplan.pipeline_order import num_warmup_forwards, rank_order

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
