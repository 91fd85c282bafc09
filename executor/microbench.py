"""``moeplan calibrate``: measures this machine with as many processes at once as a plan will run, for a profile."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import moeplan
from moeplan.errors import InvalidInputError, RunFailedError
from moeplan.executor.microbench_profile import num_cores, profile_from_readings
from moeplan.executor.microbench_window import Reading
from moeplan.hwprofiles.schema import HardwareProfile

MAX_PROCESSES = 64  # beyond it, processes that wait their turn on a few cores say nothing about training
WORKER = "moeplan.executor.microbench_worker"


def calibrate(
    num_processes: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
    device: str = "cpu",
    quick: bool = True,
) -> HardwareProfile:
    """Profile ``cpu-host`` of one of ``num_processes`` processes that share this machine, each reading taken in all.

    Rates are means over windows in which every process does the same work, so time slices of cores that processes
    share are in them; tables hold medians over windows and processes. ``progress`` hears what is measured next.
    InvalidInputError for a device other than cpu or a number of processes out of range; RunFailedError where a
    process fails. Takes about 35 s with 4 processes on 2 cores, ``quick=False`` about four times as long.
    """
    if device != "cpu":
        raise InvalidInputError(
            f"calibrate: device: got {device!r}, allowed: cpu",
            "for a GPU write a profile with base = the nearest preset and your own figures",
        )
    if not 1 <= num_processes <= MAX_PROCESSES:
        raise InvalidInputError(
            f"calibrate: processes: got {num_processes}, allowed: 1 to {MAX_PROCESSES}",
            "give as many as the plan has ranks",
        )
    with tempfile.TemporaryDirectory(prefix="moeplan-calibrate-") as folder:
        readings, overheads_bytes = _measure(num_processes, Path(folder), progress, quick=quick)
    return profile_from_readings(readings, overheads_bytes, num_processes)


def _measure(
    num_processes: int, folder: Path, progress: Callable[[str], None], *, quick: bool
) -> tuple[list[Reading], list[float]]:
    """Run the workers; readings pooled over them, and resident bytes of each before its first tensor."""
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
            command = [sys.executable, "-m", WORKER, str(folder), str(rank), str(num_processes), str(int(quick))]
            stderr = stack.enter_context((folder / f"stderr-{rank}").open("w", encoding="utf-8"))
            stdout = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            worker = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, text=True)
            workers.append(stack.enter_context(worker))
            stack.callback(worker.kill)
        codes = _wait(workers, progress)
    if any(codes):
        raise RunFailedError(f"calibrate: a process failed: {_last_error(folder, codes)}", "see the message")
    answer = json.loads((folder / "readings.json").read_text(encoding="utf-8"))
    readings = [Reading(name, size, tuple(values)) for name, size, values in answer["readings"]]
    return readings, answer["overheads_bytes"]


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
