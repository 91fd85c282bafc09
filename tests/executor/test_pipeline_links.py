"""Messages between pipeline ranks travel before they are asked for, and no rank waits in a send."""

import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist

from moeplan.executor.mesh import build_mesh
from moeplan.executor.micro_batch import plan_shape
from moeplan.executor.pipeline_links import NUM_AHEAD, Kind, Message, PipelineLinks
from moeplan.pipeline_order import rank_order
from moeplan.plan import Plan
from tests.executor.cases import tiny_plan
from tests.executor.folding_cases import WINDOWED
from tests.executor.gloo_pool import GlooPool, gloo_pool

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(2, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


class ZeroedLinks(PipelineLinks):
    """Room for messages is zero before its receive is posted: zeroed after it, it could wipe what had arrived."""

    def _empty(self, message: Message) -> torch.Tensor:
        return super()._empty(message).zero_()


def links_of(rank: int, plan: Plan) -> PipelineLinks:
    links = ZeroedLinks(plan, build_mesh(plan.folding, rank), torch.float64, CPU)
    order = partial(rank_order, plan.pp, plan.vp, plan.num_micro_batches)
    links.expect(("F", "B"), order, plan_shape(plan).num_tokens)
    return links


def arrives_unasked(rank: int, plan: Plan) -> bool:
    """Rank 0 sends two activations; rank 1 looks at the first place posted, without asking for a message."""
    links = links_of(rank, plan)
    hidden = (1, plan.tokens_per_rank, plan.model.hidden_size)
    if rank == 0:
        for index in range(NUM_AHEAD + 1):
            links.send("F", 0, torch.full(hidden, 1.0 + index, dtype=torch.float64))
        links.finish()
        return True
    link = links.links["F", 0, 1]
    assert list(link.posted) == [("F", 0, index) for index in range(NUM_AHEAD)]
    place = link.posted["F", 0, 0][0]
    deadline = time.monotonic() + 20
    while not bool((place == 1).all()) and time.monotonic() < deadline:
        time.sleep(0.001)
    arrived = bool((place == 1).all())
    for index in range(NUM_AHEAD + 1):
        got = links.receive("F", 0, index)
        assert torch.equal(got, torch.full(hidden, 1.0 + index, dtype=torch.float64))
        assert list(link.posted) == [("F", 0, index + 1 + ahead) for ahead in range(NUM_AHEAD)]
    return arrived


def crossing(rank: int, plan: Plan) -> list[float]:
    """Each rank sends all that it has before it asks for anything: a forward of every micro-batch, or a backward."""
    links, stage = links_of(rank, plan), rank
    hidden = (1, plan.tokens_per_rank, plan.model.hidden_size)
    kinds: tuple[Kind, Kind] = ("F", "B") if rank == 0 else ("B", "F")
    for index in range(plan.num_micro_batches):
        links.send(kinds[0], stage, torch.full(hidden, float(index), dtype=torch.float64))
    got = [float(links.receive(kinds[1], 1 - stage, index).mean()) for index in range(plan.num_micro_batches)]
    links.finish()
    return got


def crossing_as_nccl(rank: int, plan: Plan) -> list[float]:
    """:func:`crossing` where the first message of a group holds up its ranks until both have come to it."""
    connected: set[dist.ProcessGroup] = set()
    batch = dist.batch_isend_irecv

    def connecting(operations: list[dist.P2POp]) -> list[dist.Work]:
        group = operations[0].group
        assert group is not None
        if group not in connected:
            dist.barrier(group)
            connected.add(group)
        return batch(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", connecting)
        return crossing(rank, plan)


def test_links_are_connected_before_messages_are_awaited(pool: GlooPool) -> None:
    plan = tiny_plan(WINDOWED, 2, pp=2)
    for got in pool.run(crossing_as_nccl, plan):
        assert got == [float(index) for index in range(plan.num_micro_batches)]


def test_a_message_travels_before_it_is_asked_for(pool: GlooPool) -> None:
    assert all(pool.run(arrives_unasked, tiny_plan(WINDOWED, 2, pp=2)))


def test_sends_never_wait_for_the_receiver(pool: GlooPool) -> None:
    plan = tiny_plan(WINDOWED, 2, pp=2)
    for got in pool.run(crossing, plan):
        assert got == [float(index) for index in range(plan.num_micro_batches)]
