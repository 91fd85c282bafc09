"""Bytes on a given routing: cases by hand, and the closed forms as their means."""

from itertools import combinations

import numpy as np
import pytest

from moeplan.hwprofiles.schema import DispatchBackend
from moeplan.model_spec import Moe
from moeplan.simulator.dispatch import PROBABILITY_BYTES, exchange_bytes, metadata_bytes
from moeplan.simulator.op import Placement
from tests.routed_exchange import ExpertGroup, gathered_rows, routed_bytes, routed_rows

NUM_EXPERTS, TOP_K, TOKEN_BYTES = 8, 3, 1000.0
MOE = Moe(num_experts=NUM_EXPERTS, top_k=TOP_K, expert_ffn_size=1)
# Every routing there is, once on every rank: their mean is that of a uniform one.
EVERY = np.array(list(combinations(range(NUM_EXPERTS), TOP_K)))
GROUPS = [(8, 1, 4), (8, 1, 2), (4, 2, 4), (4, 2, 8), (2, 2, 2), (4, 1, 1), (1, 4, 4)]


def test_one_token_by_hand() -> None:
    """Two domains of two ranks with two experts each; rank 0's token wants experts 1, 4, 5 and 7, rank 2's nothing."""
    index = np.full((4, 1, 4), 8)
    index[0, 0] = 1, 4, 5, 7
    group = ExpertGroup(8, ep=4, ranks_per_domain=2)
    alltoall, flex = routed_rows(index, group, "alltoall"), routed_rows(index, group, "torch")
    assert alltoall.tolist() == [[0, 0, 2, 1], [0] * 4, [0] * 4, [0] * 4]
    # Once to rank 2, which passes it on to rank 3.
    assert flex.tolist() == [[0, 0, 1, 0], [0] * 4, [0, 0, 0, 1], [0] * 4]
    assert routed_rows(index, group, "allgather").tolist() == [[int(i != j) for j in range(4)] for i in range(4)]
    (first, _, third, _) = routed_bytes(flex, 10.0, 2)
    assert (first.scale_up, first.network, third.scale_up, third.network) == (0, 10, 10, 0)


def test_rows_gathered_over_etp_are_as_many_as_the_longest_share() -> None:
    """Ranks 0 and 1 are places of ep 0, 2 and 3 of ep 1; place 0 brings three copies for ep 0, place 1 one."""
    index = np.array([[[0, 1]], [[0, 4]], [[1, 5]], [[6, 7]]])
    assert gathered_rows(index, ExpertGroup(8, ep=2, etp=2)).tolist() == [2 * 3, 2 * 3]


@pytest.mark.parametrize("backend", ["alltoall", "allgather", "deepep", "hybridep", "torch"])
@pytest.mark.parametrize("ep,etp,ranks_per_domain", GROUPS)
def test_closed_forms_are_the_mean_over_all_routings(
    backend: DispatchBackend, ep: int, etp: int, ranks_per_domain: int
) -> None:
    group = ExpertGroup(NUM_EXPERTS, ep, etp, ranks_per_domain)
    index = np.broadcast_to(EVERY, (group.num_ranks, *EVERY.shape))
    num_probabilities = {"alltoall": 1, "allgather": TOP_K, "torch": TOP_K}.get(backend, 0)
    row_bytes = TOKEN_BYTES + PROBABILITY_BYTES * num_probabilities
    placement = Placement(ep, max(1, ep * etp // ranks_per_domain))
    expected = exchange_bytes(MOE, len(EVERY), TOKEN_BYTES, backend, placement, etp=etp)
    for sent in routed_bytes(routed_rows(index, group, backend), row_bytes, ranks_per_domain):
        assert (sent.scale_up, sent.network) == pytest.approx((expected.scale_up, expected.network))


def test_metadata_is_counts_or_indices() -> None:
    assert metadata_bytes(MOE, 100, "alltoall", 4) == 4 * 4 * NUM_EXPERTS
    assert metadata_bytes(MOE, 100, "torch", 4) == metadata_bytes(MOE, 100, "allgather", 4) == 4 * 4 * 100 * TOP_K
    assert metadata_bytes(MOE, 100, "hybridep", 4) == metadata_bytes(MOE, 100, "torch", 1) == 0
