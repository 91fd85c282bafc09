"""One process of ``moeplan calibrate``. Every process measures the same thing at the same time.

Run as ``python -m moeplan.executor.microbench_worker FOLDER RANK WORLD_SIZE QUICK``; rank 0 names each part on stdout
as it begins and writes ``readings.json``.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moeplan.executor import microbench_collectives, microbench_compute, microbench_memory
from moeplan.executor.measure import resident_bytes
from moeplan.executor.microbench_window import Reading, Window

PARTS: tuple[tuple[str, Callable[[Window], list[Reading]]], ...] = (
    ("allocator", microbench_memory.allocator),  # first: what others free would hide its growth
    ("matrix products", microbench_compute.gemm),
    ("grouped matrix products", microbench_compute.grouped_gemm),
    ("attention", microbench_compute.attention),
    ("memory", microbench_compute.memory),
    ("launches", microbench_compute.launches),
    ("collectives", microbench_collectives.collectives),
)


def main(folder: Path, rank: int, world_size: int, *, quick: bool) -> None:
    """Measure all parts as one of ``world_size`` ranks; rank 0 writes what all of them read."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world_size, timeout=timedelta(minutes=2)
    )
    torch.manual_seed(rank)
    overhead_bytes = _framework_overhead_bytes()
    window = Window(quick)
    own: list[Reading] = []
    for title, part in PARTS:
        if rank == 0:
            sys.stdout.write(f"{title}, {world_size} processes\n")
            sys.stdout.flush()
        own += part(window)
    everyone: list[tuple[list[Reading], float]] = [(own, overhead_bytes)] * world_size
    dist.all_gather_object(everyone, (own, overhead_bytes))
    if rank == 0:
        overheads_bytes = [overhead for _, overhead in everyone]
        pooled = pool([reading for readings, _ in everyone for reading in readings])
        rows = [[reading.name, reading.size, reading.values] for reading in pooled]
        answer = json.dumps({"readings": rows, "overheads_bytes": overheads_bytes})
        (folder / "readings.json").write_text(answer, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _framework_overhead_bytes() -> float:
    """Resident memory with torch loaded, the process group connected and the math library started."""
    side = torch.ones(64, 64, requires_grad=True)
    (side @ side).sum().backward()
    dist.all_reduce(torch.ones(1))
    return float(resident_bytes())


def pool(readings: list[Reading]) -> list[Reading]:
    """Readings of the same name and size as one."""
    pooled: dict[tuple[str, float], Reading] = {}
    for reading in readings:
        key = (reading.name, reading.size)
        values = (*pooled[key].values, *reading.values) if key in pooled else reading.values
        pooled[key] = replace(reading, values=values)
    return list(pooled.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), quick=sys.argv[4] == "1")
