"""A pool of gloo processes that lives through a test module: starting one costs seconds, using it milliseconds."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_TIMEOUT_S = 120
# Imported once, by the process from which ranks are forked: a rank of its own takes 4 s of a core for it.
_PRELOADED = ["pytest", "hypothesis", "torch.distributed", "moeplan.executor.train", "moeplan.executor.worker"]


class GlooPool:
    """Ranks of one world. ``run`` calls one function on all of them."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of ``function(rank, *arguments)`` by rank. The function must be importable: a module's own."""
        for connection in self._connections:
            connection.send((function, arguments))
        results = []
        for rank, connection in enumerate(self._connections):
            assert connection.poll(_TIMEOUT_S), f"rank {rank} does not answer"
            is_ok, result = connection.recv()
            assert is_ok, f"rank {rank}: {result}"
            results.append(result)
        return results


@contextmanager
def gloo_pool(world_size: int, folder: Path, backend: str = "gloo") -> Iterator[GlooPool]:
    """A running pool; ``folder`` holds the file by which its ranks find each other. ``nccl``: a GPU for each rank."""
    # CUDA does not survive a fork.
    context: Any = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
    if backend == "gloo":
        context.set_forkserver_preload(_PRELOADED)
    connections, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        arguments = (rank, world_size, str(folder / "store"), theirs, backend, dict(os.environ))
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        connections.append(ours)
        processes.append(process)
    try:
        yield GlooPool(connections)
    finally:
        for connection in connections:
            connection.send(None)
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


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
