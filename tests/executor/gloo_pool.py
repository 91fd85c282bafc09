"""A pool of processes that lives through a test module: starting one costs seconds, using it milliseconds."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# A rank that does not answer waits for another, or for its GPU; on two GPUs nothing takes nearly as long.
_TIMEOUT_S = {"gloo": 180.0, "nccl": 60.0}
_GRACE_S = 3.0  # for the other ranks to fail as well, once one has
_ENDED = "the process ended"
# Imported once, by the process from which ranks are forked: a rank of its own takes 4 s of a core for it.
_PRELOADED = ["pytest", "hypothesis", "torch.distributed", "moeplan.executor.train", "moeplan.executor.worker"]


class GlooPool:
    """Ranks of one world. ``run`` calls one function on all of them.

    A call that leaves some rank waiting ends the ranks, and the next call starts others: one failure is one test's.
    """

    def __init__(self, world_size: int, folder: Path, backend: str) -> None:
        self._world_size, self._folder, self._backend = world_size, folder, backend
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._num_starts = 0
        self._start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of ``function(rank, *arguments)`` by rank. The function must be importable: a module's own."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            with suppress(OSError):  # a process that ended is found below
                connection.send((function, arguments))
        results, failures = self._answers()
        silent = sorted(set(range(self._world_size)) - results.keys() - failures.keys())
        # On NCCL a failure may leave work in communicators that nobody else will do.
        if silent or _ENDED in failures.values() or (failures and self._backend == "nccl"):
            self._kill()
        said = [f"rank {rank}: {message}" for rank, message in failures.items()]
        assert not failures, "\n".join([*said, *(f"rank {rank} did not come back" for rank in silent)])
        assert not silent, f"rank {silent[0]} does not answer"
        return [results[rank] for rank in range(self._world_size)]

    def _answers(self) -> tuple[dict[int, Any], dict[int, str]]:
        """Results and tracebacks of the ranks that come to an end in time, by rank, the first failure first."""
        rank_of = {connection: rank for rank, connection in enumerate(self._connections)}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline_s = time.monotonic() + _TIMEOUT_S[self._backend]
        while rank_of and (ready := wait(list(rank_of), max(0.0, deadline_s - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = rank_of.pop(connection)
                try:
                    is_ok, result = connection.recv()
                except (EOFError, ConnectionError):
                    is_ok, result = False, _ENDED
                (results if is_ok else failures)[rank] = result
            if failures:
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        return results, failures

    def end(self) -> None:
        """Let the ranks leave, and kill those that do not."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        for process in self._processes:
            process.join(5)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        # CUDA does not survive a fork.
        context: Any = multiprocessing.get_context("forkserver" if self._backend == "gloo" else "spawn")
        if self._backend == "gloo":
            context.set_forkserver_preload(_PRELOADED)
        self._num_starts += 1
        store = str(self._folder / f"store-{self._num_starts}")  # by which the ranks find each other
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self._world_size, store, theirs, self._backend, dict(os.environ))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)


@contextmanager
def gloo_pool(world_size: int, folder: Path, backend: str = "gloo") -> Iterator[GlooPool]:
    """A running pool; ``folder`` is empty, and its own. ``nccl``: a GPU for each rank."""
    pool = GlooPool(world_size, folder, backend)
    try:
        yield pool
    finally:
        pool.end()


def _serve(  # noqa: PLR0917 - processes are started with a tuple
    rank: int, world_size: int, store: str, connection: Connection, backend: str, environment: dict[str, str]
) -> None:
    os.environ.update(environment | {"OMP_NUM_THREADS": "1"})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size, device_id=device)
    while (request := connection.recv()) is not None:
        function, arguments = request
        try:
            connection.send((True, function(rank, *arguments)))
        except Exception:  # noqa: BLE001 - the test fails with the traceback of the rank
            connection.send((False, traceback.format_exc()))
        _end_groups()
    dist.destroy_process_group()


def _end_groups() -> None:
    """End the groups that a call made: each has a thread that wakes every 10 ms, and hundreds of them fill a core."""
    import torch.distributed as dist

    made = dist.distributed_c10d._world.pg_map  # torch lists the groups nowhere else
    for group in [group for group in made if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
