"""The pool of processes that the executor's tests share: one failure is one test's."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.executor import gloo_pool as gloo_pool_module
from tests.executor.gloo_pool import GlooPool, gloo_pool


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(2, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


def sum_of_ranks(rank: int) -> float:
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    return float(value)


def fail_alone(rank: int) -> None:
    """The other rank waits in a collective that never comes."""
    if rank == 1:
        raise RuntimeError("only here")
    dist.all_reduce(torch.ones(1))


def leave_alone(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def fail_together(rank: int) -> None:
    raise RuntimeError(f"here as well: {rank}")


def process_id(rank: int) -> int:
    return os.getpid()


def test_a_rank_that_fails_is_heard_while_another_waits_for_it(pool: GlooPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_pool_module, "_GRACE_S", 0.2)
    before = pool.run(process_id)
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*only here.*rank 0 did not come back"):
        pool.run(fail_alone)
    assert pool.run(sum_of_ranks) == [3, 3]
    assert not set(before) & set(pool.run(process_id))


def test_a_rank_that_is_gone_is_named(pool: GlooPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_pool_module, "_GRACE_S", 0.2)
    with pytest.raises(AssertionError, match="rank 1: the process ended"):
        pool.run(leave_alone)
    assert pool.run(sum_of_ranks) == [3, 3]


def test_ranks_that_fail_together_go_on(pool: GlooPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_pool_module, "_GRACE_S", 60)  # however busy the machine is
    before = pool.run(process_id)
    with pytest.raises(AssertionError, match=r"(?s)here as well: \d.*here as well: \d"):
        pool.run(fail_together)
    assert pool.run(process_id) == before
