"""Collectives: ring bytes, placement over tiers, scaling from the nearest measured group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.hwprofiles.load import load_profile
from moeplan.simulator.collectives import collective_cost, nearest_curve, ring_factor, tier_cost
from moeplan.simulator.op import ALONE, Placement

H100 = load_profile("h100")
BARE = H100.model_copy(update={"collectives": ()})


def test_all_reduce_moves_twice_what_a_reduce_scatter_does() -> None:
    assert ring_factor("all_reduce", 8) == 2 * 7 / 8
    assert ring_factor("reduce_scatter", 8) == ring_factor("all_gather", 8) == 7 / 8


def test_one_rank_costs_nothing() -> None:
    assert collective_cost("all_reduce", 1e9, ALONE, H100).seconds == 0


def test_measured_group_reads_its_own_curve() -> None:
    curve = nearest_curve(H100.collectives, "all_gather", "scale_up", 8)
    assert curve is not None
    assert curve.num_ranks == 8
    seconds = collective_cost("all_gather", curve.message_bytes[-1], Placement(8, 1), H100).seconds
    assert seconds == pytest.approx(curve.curve.times[-1])


def test_between_nodes_each_nic_carries_its_share() -> None:
    spread, inside = Placement(64, 8), Placement(8, 1)
    both = collective_cost("reduce_scatter", 8e9, spread, H100)
    network = tier_cost("reduce_scatter", "network", 1e9, 8, H100)
    assert both.seconds == max(network.seconds, collective_cost("reduce_scatter", 8e9, inside, H100).seconds)


def test_without_curves_the_link_and_a_note_stand_in() -> None:
    cost = collective_cost("all_gather", 8e9, Placement(8, 1), BARE)
    link = BARE.scale_up_bytes_per_s_per_dir_per_gpu.value
    assert cost.seconds == pytest.approx(20e-6 + 7e9 / (0.75 * link))
    assert cost.source == "assumed"
    assert "no curve" in cost.note


@given(num_bytes=st.floats(1, 1e10), growth=st.floats(1, 100), ranks=st.sampled_from([2, 4, 8, 16, 64]))
def test_more_bytes_never_take_less_time(num_bytes: float, growth: float, ranks: int) -> None:
    group = Placement(ranks, max(1, ranks // 8))
    small = collective_cost("all_reduce", num_bytes, group, H100).seconds
    assert collective_cost("all_reduce", num_bytes * growth, group, H100).seconds >= small * (1 - 1e-12)
