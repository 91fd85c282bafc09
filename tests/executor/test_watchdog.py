"""Ranks that hang: who is named, and where the others wait."""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from moeplan.executor.watchdog import Watchdog, Whereabouts, hang_message
from tests.executor import test_launch
from tests.executor.gloo_pool import GlooPool, gloo_pool
from tests.executor.run_files import files


@dataclass
class Watched:
    progress: int = 0
    current_step: int = 7


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(2, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


def late_for_a_collective(rank: int, path: Path, watched: Watched, sleep_s: float, timeout_s: float) -> list[str]:
    """Messages on this rank when rank 1 sleeps before a sum that rank 0 waits in."""
    messages: list[str] = []
    with Watchdog(watched, FileStore(str(path), 2), timeout_s, messages.append):
        if rank == 1:
            time.sleep(sleep_s)
        dist.all_reduce(torch.ones(1))
    return messages


def test_a_rank_that_comes_late_is_told_from_one_that_waits(pool: GlooPool, tmp_path: Path) -> None:
    # Rank 1 makes progress, by its own account, and is late nevertheless: only rank 0 has waited too long.
    messages = pool.run(late_for_a_collective, tmp_path / "store", Watched(), 5.0, 1.0)
    (message,) = messages[0] + messages[1]
    assert message == (
        "no progress for 1 s in step 7: rank 1 is in executor/test_watchdog.py, late_for_a_collective; "
        "rank 0 waits in all_reduce of ranks 0, 1"
    )


@pytest.mark.parametrize("watched, timeout_s", [(Watched(), 60.0), (Watched(current_step=0), 0.1)])
def test_what_is_in_time_or_between_steps_is_no_hang(
    pool: GlooPool, tmp_path: Path, watched: Watched, timeout_s: float
) -> None:
    assert pool.run(late_for_a_collective, tmp_path / "store", watched, 2.5, timeout_s) == [[], []]


def test_the_message_names_the_fault_first() -> None:
    found = {
        0: Whereabouts("executor/dispatch.py, dispatch", "all_to_all_single", (0, 1)),
        1: Whereabouts("executor/data.py, read"),
        2: Whereabouts("executor/pipeline.py, take", "`work.wait()`"),
    }
    assert hang_message(3, 600, 4, found) == (
        "no progress for 600 s in step 3: rank 3 does not answer; rank 1 is in executor/data.py, read; "
        "rank 0 waits in all_to_all_single of ranks 0, 1; rank 2 waits in `work.wait()`"
    )


def test_a_run_with_a_stopped_rank_ends_and_names_it(tmp_path: Path) -> None:
    paths = files(tmp_path, test_launch.PLAN, steps=10_000, hang_timeout_s=2.0)
    launcher, children = test_launch.start(paths)
    children[1].send_signal(signal.SIGSTOP)
    begin_s = time.monotonic()
    _, text = launcher.communicate(timeout=60)
    errors = [line for line in text.splitlines() if not line.startswith("step ")]
    assert len(errors) == 1, errors
    assert "no progress for 2 s in step" in errors[0]
    assert "rank 1 does not answer; rank 0 waits in " in errors[0]
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert time.monotonic() - begin_s < 30
