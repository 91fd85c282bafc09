"""Copies of a token and exchange times, against the report's section 2."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import DispatchBackend
from moeplan.model_spec import Moe, Router
from moeplan.presets import load_model
from moeplan.simulator.costs import cost
from moeplan.simulator.dispatch import exchange_bytes, expected_distinct_bins
from moeplan.simulator.op import ALONE, Op, Placement

DEEPSEEK = load_model("deepseek-v3").moe
UNIFORM = Moe(num_experts=256, top_k=8, expert_ffn_size=2048)
TOKEN_BYTES = 2 * 7168.0


@pytest.mark.parametrize(
    "bins, expected", [(2, 1.99), (4, 3.61), (8, 5.29), (16, 6.52), (32, 7.27), (64, 7.68), (256, 8.0), (1, 1.0)]
)
def test_distinct_destinations_of_uniform_routing(bins: int, expected: float) -> None:
    assert expected_distinct_bins(256, 8, bins, 1, 1) == pytest.approx(expected, abs=0.005)


def test_group_limited_routing_reaches_fewer_nodes() -> None:
    assert expected_distinct_bins(256, 8, 8, 8, 4) == pytest.approx(3.63, abs=0.005)
    assert expected_distinct_bins(256, 8, 8, 8, 4) <= 4


@given(
    groups=st.sampled_from([1, 2, 4, 8]),
    chosen=st.integers(1, 8),
    bins=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    top_k=st.integers(1, 8),
)
def test_distinct_destinations_are_bounded(groups: int, chosen: int, bins: int, top_k: int) -> None:
    chosen = min(chosen, groups)
    distinct = expected_distinct_bins(64, top_k, bins, groups, chosen)
    assert 1 - 1e-9 <= distinct <= min(top_k, bins) + 1e-9


def test_alltoall_sends_k_copies() -> None:
    sent = exchange_bytes(UNIFORM, 4096, TOKEN_BYTES, "alltoall", Placement(64, 8))
    assert sent.scale_up + sent.network == pytest.approx(4096 * 8 * (TOKEN_BYTES + 4) * 63 / 64)
    assert sent.network == pytest.approx(4096 * 8 * (TOKEN_BYTES + 4) * 7 / 8)


def test_flex_sends_one_copy_a_node_over_the_network() -> None:
    assert DEEPSEEK is not None
    sent = exchange_bytes(DEEPSEEK, 4096, TOKEN_BYTES, "deepep", Placement(64, 8))
    assert sent.network == pytest.approx(4096 * TOKEN_BYTES * 3.629 * 7 / 8, rel=1e-3)


def test_one_rank_sends_nothing() -> None:
    sent = exchange_bytes(UNIFORM, 4096, TOKEN_BYTES, "hybridep", ALONE)
    assert (sent.scale_up, sent.network) == (0, 0)


# Report table 7, dispatch and combine in microseconds, mean of both; 4096 tokens of 7168 in BF16.
TABLE_7 = [
    ("gb200", "hybridep", 8, 372),
    ("gb200", "hybridep", 64, 710),
    ("gb200", "alltoall", 8, 738),
    ("gb200", "alltoall", 64, 878),
    ("h100", "hybridep", 8, 643),
    ("h100", "hybridep", 16, 1587),
    ("h100", "hybridep", 32, 3076),
    ("h100", "hybridep", 64, 4512),
    ("h100", "alltoall", 8, 1271),
    ("h100", "alltoall", 16, 5701),
    ("h100", "alltoall", 64, 8946),
]


@pytest.mark.parametrize("hardware, backend, ep, microseconds", TABLE_7)
def test_exchange_times_of_the_report(hardware: str, backend: DispatchBackend, ep: int, microseconds: float) -> None:
    profile = load_profile(hardware)
    group = Placement(ep, max(1, ep // int(profile.scale_up_domain_gpus.value)))
    moe = (
        UNIFORM.model_copy(update={"router": Router(num_groups=8, top_groups=4)}) if group.num_domains > 1 else UNIFORM
    )
    sent = exchange_bytes(moe, 4096, TOKEN_BYTES, backend, group)
    op = Op(
        name="dispatch",
        kind="exchange",
        family="dispatch",
        comm_bytes=sent.scale_up,
        network_bytes=sent.network,
        backend=backend,
    )
    assert cost(op, profile).seconds * 1e6 == pytest.approx(microseconds, rel=0.17)


# Report section 2.3, microseconds: GB200 HybridEP and all-to-all, H100 HybridEP and all-to-all.
LATENCIES = {
    ("dispatch", 8): (391, 735, 661, 1265),
    ("dispatch", 16): (578, 743, 1485, 5774),
    ("dispatch", 32): (612, 769, 3064, 8059),
    ("dispatch", 64): (675, 930, 4626, 9164),
    ("combine", 8): (353, 741, 624, 1277),
    ("combine", 16): (527, 765, 1688, 5628),
    ("combine", 32): (646, 758, 3088, 7815),
    ("combine", 64): (744, 827, 4398, 8727),
}


def latency_error_frac(hardware: str, backend: DispatchBackend, ep: int, microseconds: float) -> float:
    """Routing is uniform inside NVLink, group-limited across nodes: the reading that a NIC of 50 GB/s allows."""
    is_rack, moe = hardware == "gb200", load_model("deepseek-v3").moe
    assert moe is not None
    if is_rack or ep == 8:
        moe = moe.model_copy(update={"router": moe.router.model_copy(update={"num_groups": 1, "top_groups": 1})})
    group = Placement(ep, 1 if is_rack else ep // 8)
    sent = exchange_bytes(moe, 4096, 7168 * 2, backend, group)
    op = Op(
        name="exchange",
        kind="exchange",
        family="dispatch",
        comm_bytes=sent.scale_up,
        network_bytes=sent.network,
        backend=backend,
        group=group,
    )
    return cost(op, load_profile(hardware)).seconds / (microseconds * 1e-6) - 1


def test_latencies_of_the_report() -> None:
    columns: tuple[tuple[str, DispatchBackend], ...] = (
        ("gb200", "hybridep"),
        ("gb200", "alltoall"),
        ("h100", "hybridep"),
        ("h100", "alltoall"),
    )
    errors = [
        abs(latency_error_frac(hardware, backend, ep, microseconds))
        for (_, ep), row in LATENCIES.items()
        for (hardware, backend), microseconds in zip(columns, row, strict=True)
    ]
    assert max(errors) <= 0.18
    assert median(errors) <= 0.08
