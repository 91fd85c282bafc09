"""``moeplan calibrate``: measures this machine with as many processes at once as a plan will run, for a profile."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import moeplan
from moeplan.errors import InvalidInputError, RunFailedError
from moeplan.executor.microbench_cuda_profile import base_profile, profile_from_cuda_readings
from moeplan.executor.microbench_profile import num_cores, profile_from_readings
from moeplan.executor.microbench_window import Reading
from moeplan.hwprofiles.schema import HardwareProfile

MAX_PROCESSES = 64  # beyond it, processes that wait their turn on a few cores say nothing about training
WORKERS = {"cpu": "moeplan.executor.microbench_worker", "cuda": "moeplan.executor.microbench_cuda_worker"}
DEVICES = ("auto", *WORKERS)


def calibrate(
    num_processes: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
    device: str = "auto",
    quick: bool = True,
) -> HardwareProfile:
    """Profile of this machine, each reading taken in ``num_processes`` processes at once (on CUDA: as many GPUs).

    On a CPU ``cpu-host``, one of the processes that share the machine: rates are means over windows in which every
    process does the same work, so time slices of cores that processes share are in them. On CUDA the preset of the
    GPU with what was measured under load in place of its figures. Tables hold medians over windows and processes;
    ``progress`` hears what is measured next. ``device`` auto: CUDA where there is a GPU. InvalidInputError for an
    unknown device, a GPU without a preset or a number of processes out of range; RunFailedError where a process fails.
    Takes about 35 s with 4 processes on 2 cores, an estimated four minutes on a GPU, seven where
    quack is installed; ``quick=False`` takes longer windows, but for experts.
    """
    if device not in DEVICES:
        raise InvalidInputError(f"calibrate: device: got {device!r}, allowed: {', '.join(DEVICES)}", "leave it out")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        _check_gpus(num_processes)
    if not 1 <= num_processes <= MAX_PROCESSES:
        raise InvalidInputError(
            f"calibrate: processes: got {num_processes}, allowed: 1 to {MAX_PROCESSES}",
            "give as many as the plan has ranks",
        )
    with tempfile.TemporaryDirectory(prefix="moeplan-calibrate-") as folder:
        answer = _measure(WORKERS[device], num_processes, Path(folder), progress, quick=quick)
    readings = [Reading(name, size, tuple(values)) for name, size, values in answer["readings"]]
    if device == "cuda":
        return profile_from_cuda_readings(readings, answer, num_processes)
    return profile_from_readings(readings, answer["overheads_bytes"], num_processes)


def _check_gpus(num_processes: int) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_processes > num_gpus:
        raise InvalidInputError(
            f"calibrate: device cuda: {num_processes} processes on {num_gpus} GPUs, allowed: at most one a GPU",
            "lower --processes, or measure the processors with --device cpu",
        )
    base_profile(torch.cuda.get_device_name())


def _measure(
    worker_module: str, num_processes: int, folder: Path, progress: Callable[[str], None], *, quick: bool
) -> dict[str, Any]:
    """Run the workers; what rank 0 leaves: readings pooled over all, and bytes each held before its first tensor."""
    num_threads = max(1, num_cores() // num_processes)
    root = str(Path(moeplan.__file__).resolve().parents[1])
    environment = {
        # One host: names that do not resolve, or interfaces that go elsewhere, are no concern of ours.
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
    }
    with ExitStack() as stack:
        workers: list[subprocess.Popen[str]] = []
        for rank in range(num_processes):
            command = [sys.executable, "-m", worker_module, str(folder), str(rank), str(num_processes), str(int(quick))]
            stderr = stack.enter_context((folder / f"stderr-{rank}").open("w", encoding="utf-8"))
            stdout = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            worker = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, text=True)
            workers.append(stack.enter_context(worker))
            stack.callback(worker.kill)
        codes = _wait(workers, progress)
    if any(codes):
        raise RunFailedError(f"calibrate: a process failed: {_last_error(folder, codes)}", "see the message")
    answer: dict[str, Any] = json.loads((folder / "readings.json").read_text(encoding="utf-8"))
    return answer


def _wait(workers: Sequence[subprocess.Popen[str]], progress: Callable[[str], None]) -> list[int]:
    """Exit codes of the workers once rank 0 has closed its stdout; 1 for one that then hangs."""
    assert workers[0].stdout is not None
    for line in workers[0].stdout:
        progress(line.strip())
    codes = []
    for worker in workers:
        try:
            codes.append(worker.wait(timeout=60))
        except subprocess.TimeoutExpired:
            codes.append(1)
    return codes


def _last_error(folder: Path, codes: Sequence[int]) -> str:
    """The last line that a failed process wrote, of the lowest rank that wrote one."""
    for rank in (rank for rank, code in enumerate(codes) if code):
        lines = (folder / f"stderr-{rank}").read_text(encoding="utf-8", errors="replace").split("\n")
        written = [line for line in lines if line.strip()]
        if written:
            return f"rank {rank}: {written[-1].strip()}"
    return f"exit codes {list(codes)}"
