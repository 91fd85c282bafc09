"""One process of ``moeplan calibrate`` on a CUDA device: one GPU.

Run as ``python -m moeplan.executor.microbench_cuda_worker FOLDER RANK WORLD_SIZE QUICK``; rank 0 names each part on
stdout as it begins and writes ``readings.json``. All GPUs measure the same thing at the same time.
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moeplan.executor import microbench_collectives, microbench_cuda, microbench_cuda_experts
from moeplan.executor.measure import context_bytes
from moeplan.executor.microbench_cuda_window import CudaWindow
from moeplan.executor.microbench_window import Reading
from moeplan.executor.microbench_worker import pool
from moeplan.executor.power import PowerSamples
from moeplan.kernels import flash_attention, grouped_gemm_quack

PARTS: tuple[tuple[str, Callable[[CudaWindow], list[Reading]]], ...] = (
    ("matrix products", microbench_cuda.gemm),
    ("grouped matrix products", microbench_cuda_experts.grouped_gemm),
    ("attention", microbench_cuda.attention),
    ("memory", microbench_cuda.memory),
    ("launches", microbench_cuda.launches),
    ("host link", microbench_cuda.host_link),
)


def main(folder: Path, rank: int, world_size: int, *, quick: bool) -> None:
    """Measure all parts as one of ``world_size`` ranks; rank 0 writes what all of them read."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=2),
        device_id=device,
    )
    dist.all_reduce(torch.ones(1, device=device))  # NCCL takes its memory at the first collective
    torch.manual_seed(rank)
    window, power = CudaWindow(quick, device), PowerSamples()
    own: list[Reading] = []
    for title, part in PARTS:
        if rank == 0:
            sys.stdout.write(f"{title}, {torch.cuda.get_device_name(device)}\n")
            sys.stdout.flush()
        own += part(window)
        power.sample(device)
        torch.cuda.empty_cache()
    own += microbench_collectives.collectives(window)
    overhead_bytes = context_bytes(device)
    everyone: list[tuple[list[Reading], float]] = [(own, overhead_bytes)] * world_size
    dist.all_gather_object(everyone, (own, overhead_bytes))
    if rank == 0:
        pooled = pool([reading for readings, _ in everyone for reading in readings])
        answer = {
            "readings": [[reading.name, reading.size, reading.values] for reading in pooled],
            "overheads_bytes": [overhead for _, overhead in everyone],
            "device": torch.cuda.get_device_name(device),
            "memory_bytes": torch.cuda.mem_get_info(device)[1],
            "num_sms": torch.cuda.get_device_properties(device).multi_processor_count,
            "power": power.provenance(),
            "packages": _packages(device),
        }
        (folder / "readings.json").write_text(json.dumps(answer), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _packages(device: torch.device) -> str:
    """Optional packages whose kernels run here, with versions."""
    x = torch.empty(8, 8, dtype=torch.bfloat16, device=device)
    found = [
        (grouped_gemm_quack.PACKAGE, grouped_gemm_quack.installed_version(), grouped_gemm_quack.takes(x, x[None])),
        (
            flash_attention.PACKAGE,
            flash_attention.installed_version(),
            flash_attention.takes(x[None, None], x[None, None]),
        ),
    ]
    return ", ".join(f"{package} {version}" for package, version, runs in found if runs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), quick=sys.argv[4] == "1")
