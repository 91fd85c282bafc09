"""Bytes of every collective call of a dispatch and its combine, against the simulator's count on that routing."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from moeplan.executor.dispatch import DISPATCHERS
from moeplan.executor.dispatch_options import DispatchOptions
from moeplan.executor.exchange import combine, dispatch
from moeplan.executor.mesh import build_mesh
from moeplan.folding import Folding
from moeplan.hwprofiles.schema import DispatchBackend
from moeplan.model_spec import Moe
from moeplan.simulator.dispatch import exchange_bytes, metadata_bytes
from moeplan.simulator.op import Placement
from tests.executor.gloo_pool import GlooPool, gloo_pool
from tests.executor.traffic import Sent, counting_traffic
from tests.routed_exchange import ExpertGroup, gathered_rows, routed_bytes, routed_rows

NUM_RANKS, NUM_EXPERTS, TOP_K, NUM_TOKENS, HIDDEN = 4, 8, 3, 20, 6
TOKEN_BYTES, PROBABILITY_BYTES = 8 * HIDDEN, 8  # float64
# ep, etp, ranks of a host.
GROUPS = [ExpertGroup(NUM_EXPERTS, *sizes) for sizes in ((4, 1, 2), (2, 2, 2), (4, 1, 4), (2, 2, 4), (1, 4, 4))]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(NUM_RANKS, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


def indices(drops: bool) -> Tensor:
    """Of all ranks [P, L, K]; some dropped where asked for."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(NUM_RANKS, NUM_TOKENS, NUM_EXPERTS, generator=generator)
    index = scores.topk(TOP_K, 2).indices
    return index.masked_fill(torch.rand(index.shape, generator=generator) < 0.2, NUM_EXPERTS) if drops else index


def calls_of(rank: int, name: str, group: ExpertGroup, drops: bool) -> tuple[list[Sent], list[Sent], list[Sent]]:
    """Calls of one dispatch, of its combine, and of the backward of both."""
    os.environ["LOCAL_WORLD_SIZE"] = str(group.ranks_per_domain)
    mesh = build_mesh(Folding(NUM_RANKS, etp=group.etp, ep=group.ep), rank)
    dispatcher = DISPATCHERS[name](DispatchOptions(NUM_EXPERTS, TOP_K, probs_before_fc2=True, drops=drops), mesh)
    x = torch.ones(NUM_TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    probs = torch.ones(NUM_TOKENS, TOP_K, dtype=torch.float64, requires_grad=True)
    with counting_traffic() as there:
        arrived, exchange = dispatch(dispatcher, x, indices(drops)[rank], probs)
    assert arrived.probs is not None
    with counting_traffic() as back:
        y = combine(exchange, arrived.rows * arrived.probs[:, None], arrived, probs)
    with counting_traffic() as backward:
        y.sum().backward()
    assert not [call for call in backward if call.kind == "all_reduce"]
    return there, back, backward


def sent_to(calls: list[Sent]) -> list[int]:
    """Bytes that a rank sends to each rank of the group in its all-to-alls."""
    total = [0] * NUM_RANKS
    for call in calls:
        for peer, num_bytes in zip(call.ranks, call.to_bytes, strict=call.kind == "all_to_all"):
            total[peer] += num_bytes
    return total


def messages(calls: list[Sent], kind: str) -> list[int]:
    return [call.message_bytes for call in calls if call.kind == kind]


def without_diagonal(matrix: list[list[int]]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    found = np.array(matrix)
    np.fill_diagonal(found, 0)
    return found


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["alltoall", "torch"])
def test_exchanged_bytes_are_those_of_the_routing(
    pool: GlooPool, name: DispatchBackend, group: ExpertGroup, drops: bool
) -> None:
    ranks = pool.run(calls_of, name, group, drops)
    rows = routed_rows(indices(drops).numpy(), group, name)
    num_probabilities = 1 if name == "alltoall" else TOP_K
    row_bytes = TOKEN_BYTES + PROBABILITY_BYTES * num_probabilities
    there, back, backward = (
        without_diagonal([sent_to(calls) for calls in phase]) for phase in zip(*ranks, strict=True)
    )
    assert (there == rows * row_bytes).all()
    assert (back == rows.T * TOKEN_BYTES).all()
    # Gradients of outputs go out as tokens did, those of rows and probabilities come back as outputs did.
    assert (backward == rows * TOKEN_BYTES + rows.T * row_bytes).all()
    for rank, sent in enumerate(routed_bytes(rows, row_bytes, group.ranks_per_domain)):
        inside = np.arange(NUM_RANKS) // group.ranks_per_domain == rank // group.ranks_per_domain
        assert (there[rank][inside].sum(), there[rank][~inside].sum()) == (sent.scale_up, sent.network)
    for rank, (first, second, _) in enumerate(ranks):
        metadata, *gathered = messages(first, "all_gather")
        assert metadata == metadata_bytes(moe(), NUM_TOKENS, name, NUM_RANKS)
        wanted = (
            gathered_rows(indices(drops).numpy(), group)[rank // group.etp]
            if name == "alltoall" and group.etp > 1
            else 0
        )
        assert sum(gathered) == wanted * row_bytes
        assert sum(messages(second, "reduce_scatter")) == wanted * TOKEN_BYTES


@pytest.mark.parametrize("group", GROUPS)
def test_gathered_bytes_are_every_token(pool: GlooPool, group: ExpertGroup) -> None:
    row_bytes = TOKEN_BYTES + PROBABILITY_BYTES * TOP_K
    rows = routed_rows(indices(drops=False).numpy(), group, "allgather")
    for first, second, backward in pool.run(calls_of, "allgather", group, False):
        metadata, *gathered = messages(first, "all_gather")
        assert metadata == metadata_bytes(moe(), NUM_TOKENS, "allgather", NUM_RANKS)
        # In the message of an all-gather a rank's own share counts, to each other rank it sends one.
        assert sum(gathered) == (rows[0].sum() + NUM_TOKENS) * row_bytes
        assert messages(second, "reduce_scatter") == [(rows[0].sum() + NUM_TOKENS) * TOKEN_BYTES]
        assert sum(messages(backward, "reduce_scatter")) == sum(gathered)
        assert messages(backward, "all_gather") == messages(second, "reduce_scatter")
    placement = Placement(group.ep, NUM_RANKS // group.ranks_per_domain)
    closed = exchange_bytes(moe(), NUM_TOKENS, TOKEN_BYTES, "allgather", placement, etp=group.etp)
    probabilities = rows[0].sum() * TOP_K * (PROBABILITY_BYTES - 4)  # the closed form has them in fp32
    assert closed.scale_up + closed.network == rows[0].sum() * row_bytes - probabilities


def moe() -> Moe:
    return Moe(num_experts=NUM_EXPERTS, top_k=TOP_K, expert_ffn_size=8)
