"""Saving and loading a run with torch.distributed.checkpoint, at any folding.

Every rank writes each element that it alone counts (``FlatBuffer.counted``), so all ranks write about equally much and
nothing twice; on loading, each reads what it holds, whoever wrote it. Weights are stored in the precision in which they
are updated.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeplan.errors import InvalidInputError, MoeplanError, RunFailedError
from moeplan.executor.checkpoint_files import (
    LATEST,
    DamagedCheckpointError,
    FileSum,
    Manifest,
    begin_saving,
    checkpoints_to_try,
    finish_saving,
    latest_checkpoint,
    problem_of,
    read_manifest,
    saving_place,
    sum_file,
)
from moeplan.executor.collectives import gather_objects
from moeplan.executor.failure import is_lost_peer
from moeplan.executor.flat_buffer import Span
from moeplan.executor.mesh import Mesh
from moeplan.executor.model import Transformer
from moeplan.executor.optimizer import ChainedOptimizer
from moeplan.executor.tensor_slices import TensorSlice, buffer_slices
from moeplan.plan import Plan
from moeplan.run_config import RunConfig

_METADATA = ".metadata"


class Checkpointer:
    """Saves and loads one run. Collective: all ranks make it, and call its methods at the same steps."""

    def __init__(self, plan: Plan, run: RunConfig, mesh: Mesh, model: Transformer, optimizer: ChainedOptimizer) -> None:
        self.plan, self.run, self.mesh, self.model, self.optimizer = plan, run, mesh, model, optimizer
        self.folder = Path(run.save_folder)
        # Saving talks on a group of its own and through the host, so that it can go on beside training.
        self.group = dist.new_group(backend="gloo") if mesh.world.size > 1 else None
        self.is_first = mesh.rank == 0
        self.loaded: Manifest | None = None
        self.skipped: list[str] = []  # damage of newer checkpoints than the loaded one
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint belongs after ``step`` steps."""
        every = self.run.save_every
        return step == self.run.steps or (every > 0 and step % every == 0)

    def tokens_at(self, step: int) -> int:
        """Tokens of ``step`` steps, of which those before the loaded checkpoint may have had other batches."""
        first, before = (self.loaded.step, self.loaded.tokens) if self.loaded else (0, 0)
        return (before or first * self.plan.tokens_per_step) + (step - first) * self.plan.tokens_per_step

    def save(self, step: int) -> None:
        """Write the state after ``step`` steps; with ``save_async`` it is copied now and written by a thread.

        Raises RunFailedError where it, or the one before, cannot be written.
        """
        self.wait()
        slices = [replace(one, values=self._copied(one.values)) for one in self._slices(counted_only=True)]
        manifest = Manifest(
            step=step,
            tokens=self.tokens_at(step),
            model=self.plan.model,
            plan_id=self.plan.plan_id,
            num_gpus=self.plan.num_gpus,
            precision=self.plan.precision,
            seed=self.run.seed,
            data=self.run.data or ", ".join(self.run.data_mix),
            rng=bytes(torch.get_rng_state().tolist()).hex(),
        )
        if self.run.save_async:
            self._thread = threading.Thread(target=self._write_in_thread, args=(slices, manifest), daemon=True)
            self._thread.start()
        else:
            self._write_noting_errors(slices, manifest)
            self.wait()

    def wait(self) -> None:
        """Until the checkpoint that is being written is whole. Raises RunFailedError where it cannot be written.

        Where another rank ended meanwhile, what torch says of that is raised as it is: that rank has the reason.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None and is_lost_peer(error):
            raise error
        if error is not None:
            raise RunFailedError(
                f"save_folder {self.folder}: the checkpoint cannot be written: {_first_line(error)}",
                "look for a full or read-only disk; the checkpoint before it is untouched",
            ) from error

    def load(self) -> int:
        """Take the state of the latest checkpoint; returns the number of steps it has done.

        With the run's ``auto_resume``, of the newest one that is whole: ``skipped`` then says what is wrong with those
        after it, which stay as they are. Raises InvalidInputError where there is none, it is of another model, or one
        of its files is damaged.
        """
        checkpoint, manifest = self._whole_checkpoint()
        self.optimizer.begin_loading()
        self._read(checkpoint)
        self.optimizer.take_loaded(manifest.step)
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(manifest.rng)), dtype=torch.uint8))
        self.loaded = manifest
        return manifest.step

    def _whole_checkpoint(self) -> tuple[Path, Manifest]:
        """All ranks try the same ones in the same order, and leave one out where it looks damaged to any of them."""
        falls_back = self.run.auto_resume
        own = checkpoints_to_try(self.folder) if falls_back else [latest_checkpoint(self.folder)]
        damages: list[str] = []
        for checkpoint in gather_objects(own, self.mesh.world)[0]:
            manifest, problem = self._opened(checkpoint)
            damage = next(filter(None, gather_objects(problem, self.mesh.world)), "")
            if manifest is not None and not damage:
                self.skipped = damages
                return checkpoint, manifest
            damages.append(damage)
        others = f"; nor is any of the {len(damages) - 1} before it whole" if len(damages) > 1 else ""
        raise DamagedCheckpointError(
            damages[0] + others, f"restore that file, or write the name of an older checkpoint into {LATEST}"
        )

    def _opened(self, checkpoint: Path) -> tuple[Manifest | None, str]:
        """The manifest, and what is wrong with it or with this rank's share of the files."""
        try:
            manifest = read_manifest(checkpoint, self.plan.model)
        except DamagedCheckpointError as error:
            return None, error.message
        for name in sorted(manifest.files)[self.mesh.rank :: self.mesh.world.size]:
            if problem := problem_of(checkpoint, name, manifest.files[name]):
                return manifest, f"{checkpoint / name} {problem}"
        return manifest, ""

    def _copied(self, values: Tensor) -> Tensor:
        return values.detach().to("cpu", copy=True) if self.run.save_async else values.detach()

    def _slices(self, *, counted_only: bool) -> Iterator[TensorSlice]:
        """Weights, moments and router biases that this rank writes, or all that it holds."""
        for one in self.optimizer.classes:
            held = one.buffer.counted if counted_only else Span(0, one.buffer.num_elements)
            for part in one.parts:
                start = one.updated.start + part.span.start
                span = held.overlap(Span(start, start + part.span.size))
                for kind, flat in part.flats.items():
                    for found in buffer_slices(one.buffer, span, flat, start):
                        yield replace(found, name=f"{kind}/{found.name}")
        if self.mesh.stage.index == 0 or not counted_only:
            for router in self.model.routers():
                if router.bias_E is not None:
                    yield TensorSlice(f"expert_bias/{router.name}", tuple(router.bias_E.shape), (0,), router.bias_E)

    def _write_in_thread(self, slices: list[TensorSlice], manifest: Manifest) -> None:
        device = self.model.table.device
        if device.type == "cuda":  # torch's writer asks for the current one: all ranks of a host would be on GPU 0
            torch.cuda.set_device(device)
        self._write_noting_errors(slices, manifest)

    def _write_noting_errors(self, slices: list[TensorSlice], manifest: Manifest) -> None:
        try:
            self._write(slices, manifest)
        except Exception as error:  # noqa: BLE001 - a thread's error is raised by the next wait
            self._error = error

    def _write(self, slices: list[TensorSlice], manifest: Manifest) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415 - 0.5 s few runs need
        from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - likewise

        from moeplan.executor.checkpoint_planner import SlicesToSave  # noqa: PLC0415 - likewise

        place = saving_place(self.folder, manifest.step)
        if self.is_first:
            begin_saving(self.folder, manifest.step)
        self._barrier()
        writer, planner, alone = FileSystemWriter(place), SlicesToSave(slices), self.group is None
        with _no_word_of_one_process(), _reasons_raised():
            save({}, storage_writer=writer, planner=planner, process_group=self.group, no_dist=alone)
        sums = self._gathered({path.name: sum_file(path) for path in place.glob(f"__{self.mesh.rank}_*")})
        if self.is_first:
            sums[_METADATA] = sum_file(place / _METADATA)
            finish_saving(place, manifest.model_copy(update={"files": sums}), self.run.keep_checkpoints)
        self._barrier()

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def _gathered(self, sums: dict[str, FileSum]) -> dict[str, FileSum]:
        """Checksums of the files of all ranks, on the first."""
        if self.group is None:
            return sums
        found: list[Any] | None = [None] * self.mesh.world.size if self.is_first else None
        dist.gather_object(sums, found, dst=0, group=self.group)
        return {name: one for part in found or () for name, one in part.items()}

    def _read(self, checkpoint: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415 - as in _write
        from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415 - likewise

        from moeplan.executor.checkpoint_planner import SlicesToLoad  # noqa: PLC0415 - likewise

        planner = SlicesToLoad(list(self._slices(counted_only=False)))
        try:
            with _no_word_of_one_process(), _reasons_raised():
                load({}, storage_reader=FileSystemReader(checkpoint), planner=planner, no_dist=True)
        except MoeplanError:
            raise
        except Exception as error:
            raise InvalidInputError(
                f"{checkpoint} cannot be read: {_first_line(error)}", "resume from an older checkpoint"
            ) from error


@contextmanager
def _no_word_of_one_process() -> Iterator[None]:
    """Torch warns that a rank reads, or a single process writes, without the others: that is meant so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _reasons_raised() -> Iterator[None]:
    """Raise what went wrong on some rank instead of torch's CheckpointException.

    That is no Exception: it passes by whoever looks for one, and a thread that saves would end without a word.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415 - as in _write

    try:
        yield
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise RuntimeError(str(reason)) from reason


def _first_line(error: Exception) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
