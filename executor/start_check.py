"""What would end a run later, said before anything starts: by the launcher, and by the ranks that torchrun starts."""

import os
import tempfile
from pathlib import Path

from moeplan.errors import InvalidInputError
from moeplan.executor.check import (
    check_export,
    check_graph,
    check_init_from,
    check_places,
    check_run,
    check_shared_depths,
    check_supported,
    check_world,
)
from moeplan.executor.checkpoint_files import first_manifest, has_checkpoint
from moeplan.executor.step_log import check_log_folder
from moeplan.executor.token_file import run_files
from moeplan.files import check_writable
from moeplan.plan import Plan
from moeplan.run_config import RunConfig

_RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


def settled(run: RunConfig) -> RunConfig:
    """The run with ``resume`` decided: ``auto_resume``, and workers started anew, go on where there is a checkpoint.

    These take an older one where the newest is damaged, which ``auto_resume`` then says.
    """
    if run.resume or not run.save_folder or not (run.auto_resume or num_restarts()):
        return run
    return run.model_copy(update={"resume": has_checkpoint(Path(run.save_folder)), "auto_resume": True})


def check_start(plan: Plan, run: RunConfig, num_processes: int, out: Path) -> None:
    """Raise InvalidInputError for whatever can be known to fail. ``run`` is settled; folders to write in are made."""
    check_world(plan, num_processes)
    check_supported(plan)
    check_run(run)
    check_graph(plan, run)
    check_places(plan, run)
    check_shared_depths(plan, run)
    run_files(run, plan.seq_len)
    check_export(plan, run)
    check_init_from(plan, run)
    _check_pairs(run)
    _check_checkpoints(plan, run)
    if run.log_folder:
        check_log_folder(Path(run.log_folder), resume=run.resume or run.auto_resume or num_restarts() > 0)
    check_writable(out)
    for key in ("save_folder", "log_folder", "export_hf", "record_routing"):
        if getattr(run, key):
            _check_folder(key, Path(getattr(run, key)))


def check_resumed(run: RunConfig, first_step: int) -> None:
    """Raise InvalidInputError where the run has no step left after ``first_step``, and nothing else to do."""
    if first_step > run.steps or (first_step == run.steps and not run.export_hf):
        raise InvalidInputError(
            f"steps: got {run.steps}, of which {first_step} are done; allowed: more than {first_step}, or as many with "
            "export_hf",
            "raise steps: it counts from the start of the run, not from the checkpoint",
        )


def shortened(run: RunConfig, first_step: int) -> RunConfig:
    """The run with fewer untimed and traced steps where a resumed one has too few left for both, and one to time."""
    left = run.steps - first_step
    if not first_step or left > run.warmup_steps_untimed + run.profile_steps:
        return run
    return run.model_copy(update={"profile_steps": 0, "warmup_steps_untimed": max(0, left - 1)})


def _check_folder(key: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInputError(
            f"{key} {folder}: cannot be written: {error.strerror}", "choose a folder with room that you may write to"
        ) from None


def _check_pairs(run: RunConfig) -> None:
    """Settings that have no effect alone."""
    for key, other, has_other in (
        ("skip_spikes", "spike_factor", run.spike_factor > 0),
        ("eval_data", "eval_every", run.eval_every > 0),
        ("lr_cooldown_steps", "lr_schedule wsd", run.lr_schedule == "wsd"),
    ):
        if getattr(run, key) and not has_other:
            raise InvalidInputError(f"{key}: got {getattr(run, key)!r} without {other}", "give both, or neither")


def _check_checkpoints(plan: Plan, run: RunConfig) -> None:
    folder = Path(run.save_folder)
    if run.resume:
        check_resumed(run, first_manifest(folder, plan.model, falls_back=run.auto_resume).step)
    elif run.save_folder and has_checkpoint(folder):
        raise InvalidInputError(
            f"save_folder {folder}: holds checkpoints of a run", "go on with it by resume, or name a new folder"
        )


def num_restarts() -> int:
    """How often torchrun has started the ranks anew (``--max-restarts``)."""
    return int(os.environ.get(_RESTARTS_VARIABLE, "0"))
