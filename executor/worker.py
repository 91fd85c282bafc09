"""One rank of a run: ``torchrun -m moeplan.executor.worker plan.toml --run-config run.toml --out measurement.json``.

Works wherever torchrun does. A failure becomes one line on stderr, or a file for the launcher where there is one.
Exit codes are those of moeplan: 2 for invalid input, 1 for a failed run.
"""

import argparse
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from moeplan.errors import InvalidInputError, MoeplanError, OutOfMemoryError
from moeplan.executor.check import check_world
from moeplan.executor.collectives import gather_objects
from moeplan.executor.data import open_tokens
from moeplan.executor.determinism import make_deterministic
from moeplan.executor.export_hf import copy_tokenizer, export_trained
from moeplan.executor.failure import (
    LAUNCHER_VARIABLE,
    RESUME_PREFIX,
    Failure,
    FailureKind,
    is_lost_peer,
    now_s,
    write_failure,
    write_process_id,
)
from moeplan.executor.kernel_tuning import tune
from moeplan.executor.measure import reset_peak_resident
from moeplan.executor.measurement import make_figures, measure_rank, taken_bytes
from moeplan.executor.mesh import plan_mesh
from moeplan.executor.out_of_memory import HINT, is_out_of_memory, memory_explained
from moeplan.executor.start_check import check_start, num_restarts, settled
from moeplan.executor.step_log import StepLog
from moeplan.executor.train import Trainer, TrainingRecord, train
from moeplan.executor.watchdog import Watchdog, end_process
from moeplan.files import read_toml, validate, write_text_atomically
from moeplan.plan import Plan
from moeplan.run_config import RunConfig

_WATCH_INTERVAL_S = 0.5
# A rank that is gone leaves the others waiting in a collective; torchrun kills what is left 30 s after its SIGTERM.
_STOP_PATIENCE_S = 25.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank to its end and return the exit code."""
    parser = argparse.ArgumentParser(prog="torchrun -m moeplan.executor.worker", description="One rank of a run.")
    parser.add_argument("plan", type=Path, help="the plan, as TOML")
    parser.add_argument("--run-config", type=Path, help="settings of the run, as TOML; left out: defaults")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes the measurement, as JSON")
    options = parser.parse_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    faulthandler.enable(all_threads=False)  # a rank that aborts in a library says where, which the launcher quotes
    write_process_id(rank)
    threading.Thread(target=_end_with_parents, args=(os.getppid(),), daemon=True).start()
    try:
        run_rank(options.plan, options.run_config, options.out)
    except Exception as error:  # noqa: BLE001 - whatever ends a rank must reach the user as one message
        failure = _describe(error, rank)
        if not write_failure(failure):
            hint = f"\nhint: {failure.hint}" if failure.hint else ""
            sys.stderr.write(f"{failure.details}error: {failure.message}{hint}\n")
        return failure.exit_code
    return 0


def run_rank(plan_path: Path, run_path: Path | None, out_path: Path) -> None:
    """Train this rank's share of the plan; rank 0 writes the measurement."""
    plan = validate(Plan, read_toml(plan_path), str(plan_path))
    run = settled(validate(RunConfig, read_toml(run_path), str(run_path)) if run_path else RunConfig())
    rank, world_size = _world()
    check_world(plan, world_size)
    if rank == 0:  # for all: they wait for it before they train
        check_start(plan, run, world_size, out_path)
    tokens = open_tokens(plan, run)
    if run.deterministic:
        make_deterministic()
    device = _device(rank)
    taken_before_bytes = taken_bytes(device)
    _start_processes(device)
    try:
        mesh = plan_mesh(plan, rank)
        if device.type == "cpu":  # with gloo's own; of a GPU it should say what other processes have
            taken_before_bytes = taken_bytes(device)
        report = _report if rank == 0 else _ignore
        chosen = tune(plan, mesh, device, deterministic=run.deterministic, report=report)
        if rank == 0 and chosen:
            _report("kernels: " + ", ".join(f"{operation} by {backend}" for operation, backend in chosen.items()))
        trainer = Trainer(plan, run, mesh, tokens, device)
        if run.save_folder:
            _stop_at_sigterm(trainer)
        if run.resume:
            trainer.resume()
            _report_skipped(trainer, rank)
        if trainer.first_step < run.steps:
            _train_measured(trainer, rank, taken_before_bytes, out_path)
        if run.export_hf:
            export_trained(plan, mesh, trainer.model, trainer.optimizer, Path(run.export_hf))
            if run.init_from and rank == 0:
                copy_tokenizer(Path(run.init_from), Path(run.export_hf))
        dist.barrier()
    except BaseException:
        # NCCL would wait here for what other ranks have yet to do, while they wait for this one to say why it ends.
        if device.type == "cpu":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _report_skipped(trainer: Trainer, rank: int) -> None:
    """Damaged checkpoints that the run did not go on from; ranks have all found the same."""
    checkpoints = trainer.checkpoints
    if rank == 0 and checkpoints is not None and checkpoints.skipped:
        for damage in checkpoints.skipped:
            _report(f"{RESUME_PREFIX}left out: {damage}")
        _report(f"{RESUME_PREFIX}goes on after step {trainer.first_step}, from the newest whole checkpoint")


def _train_measured(trainer: Trainer, rank: int, taken_before_bytes: float, out_path: Path) -> None:
    """All steps that are left; rank 0 writes the measurement."""
    _reset_peak(trainer.device)
    record = _train(trainer, rank, taken_before_bytes)
    ranks = gather_objects(measure_rank(trainer, record, taken_before_bytes), trainer.mesh.world)
    if rank == 0:
        figures = make_figures(trainer.plan, trainer.run, ranks, record, trainer.device)
        write_text_atomically(out_path, figures.model_dump_json(indent=2) + "\n")


def _train(trainer: Trainer, rank: int, taken_before_bytes: float) -> TrainingRecord:
    """All steps; rank 0 reports them, and writes the log where the run asks for one."""
    folder = trainer.run.log_folder
    with _watchdog(trainer, rank), memory_explained(rank, trainer, taken_before_bytes):
        if rank > 0 or not folder:
            return train(trainer, _report if rank == 0 else _ignore)
        log = StepLog(Path(folder), trainer.first_step, has_balance=trainer.run.log_balance)
        try:
            return train(trainer, _report, log)
        finally:
            log.close()


def _watchdog(trainer: Trainer, rank: int) -> Watchdog:
    """A store of its own: the one of the process group may be in use by a collective that hangs."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return Watchdog(trainer, PrefixStore(_start_name(), store), trainer.run.hang_timeout_s, partial(end_process, rank))


def _world() -> tuple[int, int]:
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except KeyError as error:
        raise InvalidInputError(
            f"environment variable {error} is not set", "start with torchrun, or with moeplan run"
        ) from None


def _device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, num_devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= num_devices:
        raise InvalidInputError(
            f"rank {rank} needs GPU {local} of this host, which has {num_devices}",
            "start at most one process a GPU, or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _start_processes(device: torch.device) -> None:
    store, rank, world_size = next(rendezvous("env://"))
    # torchrun's own store outlives a restart, with the addresses of the ranks that ended.
    group: dict[str, Any] = {"store": PrefixStore(_start_name(), store), "rank": rank, "world_size": world_size}
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, **group)
    else:
        dist.init_process_group("gloo", **group)


def _start_name() -> str:
    return f"moeplan/start-{num_restarts()}"


def _stop_at_sigterm(trainer: Trainer) -> None:
    """Let SIGTERM end the run after the step under way, with its state saved; a step without end ends this process."""

    def end() -> None:
        if not trainer.is_stopping:
            os._exit(1)

    def stop(_number: int, _frame: FrameType | None) -> None:
        trainer.stop_requested = True
        timer = threading.Timer(_STOP_PATIENCE_S, end)
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, stop)


def _reset_peak(device: torch.device) -> None:
    """Forget the peak so far: drawing whole tensors in fp32 is no part of training."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak_resident()


def _report(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _ignore(line: str) -> None:
    """Only rank 0 reports."""


def _describe(error: Exception, rank: int) -> Failure:
    kind: FailureKind = "known"
    details, exit_code = "", 1
    memory_bytes: dict[str, float] = {}
    if isinstance(error, MoeplanError):
        message, hint, exit_code = error.message, error.hint, error.exit_code
        memory_bytes = error.memory_bytes if isinstance(error, OutOfMemoryError) else {}
    elif is_out_of_memory(error):
        message, hint = f"rank {rank} ran out of memory before the first step", HINT
    else:
        first_line = (str(error).splitlines() or [""])[0]
        is_lost = is_lost_peer(error)
        kind = "lost_peer" if is_lost else "unexpected"
        message = f"rank {rank} {'lost another rank' if is_lost else 'failed'}: {type(error).__name__}: {first_line}"
        hint = "look for the rank that ended first" if is_lost else "this is a fault of moeplan; please report it"
        details = "" if is_lost else traceback.format_exc()
    return Failure(rank, kind, message, hint, exit_code, now_s(), details, memory_bytes)


def _end_with_parents(parent: int) -> None:
    """End this process when the one that started it, or the launcher, is gone: no worker may be left behind."""
    launcher = int(os.environ.get(LAUNCHER_VARIABLE, "0"))
    while os.getppid() == parent and (not launcher or Path(f"/proc/{launcher}").exists()):
        time.sleep(_WATCH_INTERVAL_S)
    os._exit(1)


def _leave(exit_code: int) -> NoReturn:
    """End this process without the interpreter's own ending.

    All is written and the process groups are ended by then, but threads of gloo and of the profiler may still let go of
    tensors: on a busy host 2 of 25 runs ended with SIGABRT after their last step.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    _leave(main())
