"""Starting the ranks of a run on this host, passing on their progress, and leaving no process behind."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import moeplan
from moeplan.errors import InvalidInputError, MoeplanError, OutOfMemoryError, RunFailedError
from moeplan.executor.failure import (
    LAUNCHER_VARIABLE,
    RESUME_PREFIX,
    RUN_FOLDER_VARIABLE,
    STOPPED,
    Failure,
    read_failures,
    read_process_ids,
)
from moeplan.executor.start_check import check_start, settled
from moeplan.files import read_toml, validate, write_text_atomically
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from moeplan.run_environment import RUN_ENVIRONMENT

# Workers end at SIGTERM at once, or save their state first; whatever is left after this long is killed.
_GRACE_S, _SAVE_GRACE_S = 5.0, 35.0
_TAIL_LINES = 40
_MAX_PORT = 65535
# How torchrun's report names a rank that a signal ended: "rank : 2 (local_rank: 2)", then "exitcode : -9 (pid: 7)".
_REPORTED = re.compile(r"rank\s*:\s*(\d+) \(local_rank[^\n]*\n\s*exitcode\s*:\s*(-?\d+)")
_TORCHRUN_REPORT = re.compile(r"^.*failed \(exitcode: ", re.MULTILINE)
_PROGRESS_PREFIX = "step "
_MEASUREMENT = "measurement.json"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the hosts of a run find each other, as torchrun has it: ``endpoint`` is host:port of one, the same on all."""

    num_nodes: int
    endpoint: str
    run_id: str = "moeplan"

    @classmethod
    def of(cls, num_hosts: int, endpoint: str, run_id: str) -> "Rendezvous | None":
        """Where the hosts meet; None for a single one, whose ranks meet by themselves."""
        return cls(num_hosts, endpoint, run_id) if num_hosts > 1 else None

    def check(self, num_gpus: int) -> None:
        """Raise InvalidInputError where these hosts cannot share the plan's GPUs, or the endpoint is none."""
        if num_gpus % self.num_nodes:
            raise InvalidInputError(
                f"nnodes: got {self.num_nodes} for a plan of {num_gpus} GPUs, allowed: a divisor of {num_gpus}",
                "every host starts equally many processes",
            )
        host, _, port = self.endpoint.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) <= _MAX_PORT:
            raise InvalidInputError(
                f"rdzv-endpoint: got {self.endpoint!r}, allowed: host:port of one of the {self.num_nodes} hosts",
                "give every host the same: --rdzv-endpoint node0:29400",
            )

    def arguments(self) -> list[str]:
        host = self.endpoint.rpartition(":")[0]
        local = ["--local-addr=127.0.0.1"] if host in ("127.0.0.1", "localhost") else []
        return [
            f"--nnodes={self.num_nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self.run_id}",
            *local,
        ]


class _StoppedError(Exception):
    """A signal asked this process to end the run."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = signal.Signals(number).name


def launch(
    plan_path: Path,
    run_path: Path | None,
    out_path: Path,
    num_processes: int,
    report: Callable[[str], None] | None = None,
    *,
    rendezvous: Rendezvous | None = None,
) -> bool:
    """Train the plan with ``num_processes`` ranks, on this host or divided over the hosts of ``rendezvous``.

    The host of rank 0 writes the measurement to ``out_path`` and returns True. ``report`` gets one line a step there
    (default: stderr). Raises InvalidInputError before anything starts where plan, run
    or data cannot work, and RunFailedError naming the rank where one fails or is killed, or at SIGINT or SIGTERM;
    by then no process is left.
    """
    plan = validate(Plan, read_toml(plan_path), str(plan_path))
    run = validate(RunConfig, read_toml(run_path), str(run_path)) if run_path else RunConfig()
    check_launch(plan, run, num_processes, out_path, rendezvous)
    if rendezvous is not None:
        num_processes //= rendezvous.num_nodes
    with tempfile.TemporaryDirectory(prefix="moeplan-run-") as name:
        folder = Path(name)
        process = _start(plan_path, run_path, num_processes, folder, rendezvous)
        _follow(process, folder, report or _to_stderr, _SAVE_GRACE_S if run.save_folder else _GRACE_S)
        measured = folder / _MEASUREMENT
        if measured.exists():
            write_text_atomically(out_path, measured.read_text(encoding="utf-8"))
        return measured.exists()


def check_launch(plan: Plan, run: RunConfig, num_processes: int, out_path: Path, rendezvous: Rendezvous | None) -> None:
    """Raise InvalidInputError for whatever can be known to fail before a process is started."""
    check_start(plan, settled(run), num_processes, out_path)
    if rendezvous is not None:
        rendezvous.check(num_processes)


def _start(
    plan_path: Path, run_path: Path | None, num_processes: int, folder: Path, rendezvous: Rendezvous | None
) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += rendezvous.arguments() if rendezvous else ["--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={num_processes}", "-m", "moeplan.executor.worker", str(plan_path)]
    command += ["--out", str(folder / _MEASUREMENT)]
    if run_path is not None:
        command += ["--run-config", str(run_path)]
    threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    # A checkout runs uninstalled, from any folder.
    path = os.pathsep.join(filter(None, [str(Path(moeplan.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {
        **RUN_ENVIRONMENT,
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": path,
        RUN_FOLDER_VARIABLE: str(folder),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others in order
    )


def _follow(process: "subprocess.Popen[str]", folder: Path, report: Callable[[str], None], grace_s: float) -> None:
    """Pass progress on until the run has ended, and raise what went wrong. ``grace_s``: for the workers to end."""
    assert process.stderr is not None
    log: deque[str] = deque(maxlen=2000)
    progress = "before the first step"
    try:
        with _signals_raise():
            for line in process.stderr:
                if line.startswith(_PROGRESS_PREFIX):
                    progress = f"after {line.split('  ')[0]}"
                if line.startswith((_PROGRESS_PREFIX, RESUME_PREFIX)):
                    report(line.rstrip("\n"))
                else:
                    log.append(line)
            exit_code = process.wait()
    except _StoppedError as stopped:
        _end(process, folder, grace_s)
        raise _stopped_by(stopped.name, folder, progress) from None
    finally:
        _end(process, folder)
    if exit_code:
        raise _failure_of(folder, "".join(log), progress)


def _stopped_by(name: str, folder: Path, progress: str) -> RunFailedError:
    """What a run says that a signal ended: its workers' own words where they saved their state."""
    known = [failure for failure in read_failures(folder) if STOPPED in failure.message]
    if known:
        return RunFailedError(known[0].message.replace(STOPPED, f"was stopped by {name}"), known[0].hint)
    return RunFailedError(f"the run was stopped by {name} {progress}", "run it again to start over")


def _failure_of(folder: Path, log: str, progress: str) -> MoeplanError:
    """The one error that tells best why the run failed: a rank's own words, else the signal that ended one."""
    failures = read_failures(folder)
    killed = [(int(rank), -int(code)) for rank, code in _REPORTED.findall(log) if int(code) < 0]
    killed.sort(key=lambda rank_and_number: rank_and_number[1] == signal.SIGTERM)  # torchrun's own way to end the rest
    if failures and failures[0].kind == "known":
        return _raised_by(failures[0])
    if killed:
        rank, number = killed[0]
        return RunFailedError(f"rank {rank} was killed by {signal.Signals(number).name} {progress}", _why(number, log))
    if failures:
        return _raised_by(failures[0])
    return RunFailedError(f"the run failed {progress} and no rank said why", _end_of(log))


def _why(number: int, log: str) -> str:
    """What is known of a rank that a signal ended. One that ended itself (SIGABRT, SIGSEGV) may have said why."""
    if number == signal.SIGKILL:
        return "it may have run out of memory: look at the kernel's log"
    return "" if number == signal.SIGTERM else _end_of(log)


def _end_of(log: str) -> str:
    """What the ranks wrote last, without torchrun's own report."""
    said = log[: found.start()] if (found := _TORCHRUN_REPORT.search(log)) else log
    tail = "\n".join(said.splitlines()[-_TAIL_LINES:])
    return f"the end of its log:\n{tail}"


def _raised_by(failure: Failure) -> MoeplanError:
    if failure.memory_bytes:
        return OutOfMemoryError(failure.message, failure.hint, failure.memory_bytes)
    kind = InvalidInputError if failure.exit_code == InvalidInputError.exit_code else RunFailedError
    details = f"\n{failure.details}" if failure.details else ""
    return kind(failure.message, failure.hint + details)


def _end(process: "subprocess.Popen[str]", folder: Path, grace_s: float = _GRACE_S) -> None:
    """Leave no process: ask torchrun to end its workers, then kill what is left."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    if process.poll() is None:
        _kill_group(process.pid)
        process.wait()
    workers = read_process_ids(folder).values()
    for worker in workers:
        _kill_group(worker)  # torchrun gives each worker a session of its own
    deadline_s = time.monotonic() + _GRACE_S
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    if process.stderr is not None:
        process.stderr.close()


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGINT and SIGTERM raise where this process waits; only a main thread may ask for that, others get nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        raise _StoppedError(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
