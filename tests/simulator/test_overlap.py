"""The simulator counts the pairs that the executor runs."""

import pytest

from moeplan.pipeline_order import num_warmup_forwards, paired_order
from moeplan.simulator.overlap import paired_frac


@pytest.mark.parametrize("pp, vp, num_micro_batches, group", [(1, 1, 8, 1), (1, 1, 1, 1), (2, 2, 8, 2), (4, 3, 8, 8)])
def test_pairs_are_those_of_the_order_that_the_executor_runs(
    pp: int, vp: int, num_micro_batches: int, group: int
) -> None:
    for rank in range(pp):
        pairs = paired_order(pp, vp, num_micro_batches, rank, group)
        num_paired = sum(pair.forward is not None and pair.backward is not None for pair in pairs)
        warmup = num_warmup_forwards(pp, vp, num_micro_batches, group, rank)
        assert paired_frac(pp, vp, num_micro_batches, warmup) == num_paired / (vp * num_micro_batches)
