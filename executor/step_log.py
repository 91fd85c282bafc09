"""What a run writes down step by step: CSV, JSON lines, and TensorBoard where it is installed.

Each line is complete on disk before the next step begins. A run that goes on from a checkpoint drops the lines of steps
it will take again.
"""

import csv
import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moeplan.errors import InvalidInputError
from moeplan.files import write_text_atomically

STEP_FIELDS = ("step", "loss", "grad_norm", "lr", "step_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "tokens")
BUSIEST_LOAD = "busiest_expert_load"  # where the run asks for it
VALIDATION_FIELDS = ("step", "validation_loss")


def check_log_folder(folder: Path, *, resume: bool) -> None:
    """Raise InvalidInputError where a log of another run would be overwritten, or no folder can be."""
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"log_folder {folder}: is a file, allowed: a folder", "name another folder")
    if (folder / "steps.csv").exists() and not resume:
        raise InvalidInputError(
            f"log_folder {folder}: holds the log of a run", "name a new folder, or go on with that run by resume"
        )


class StepLog:
    """The log of one run, written by one rank. ``first_step``: steps done before, by a checkpoint.

    ``has_balance``: with a column for the load of the busiest expert.
    """

    def __init__(self, folder: Path, first_step: int, *, has_balance: bool = False) -> None:
        self.folder = folder
        self.step_fields = (*STEP_FIELDS, BUSIEST_LOAD) if has_balance else STEP_FIELDS
        folder.mkdir(parents=True, exist_ok=True)
        self._prepare("steps", self.step_fields, first_step)
        self._prepare("validation", VALIDATION_FIELDS, first_step)
        lines = _lines(folder / "log.jsonl")
        kept = [line for line in lines if json.loads(line)["step"] <= first_step]
        write_text_atomically(folder / "log.jsonl", "".join(kept))
        self._board = _tensorboard(folder, first_step)

    def step(self, values: dict[str, float]) -> None:
        """One step: a value for each of ``step_fields``."""
        self._write("steps", self.step_fields, values)

    def validation(self, step: int, loss: float) -> None:
        """Loss on held-out data after ``step`` steps."""
        self._write("validation", VALIDATION_FIELDS, {"step": step, "validation_loss": loss})

    def close(self) -> None:
        """Hand the last events to TensorBoard."""
        if self._board is not None:
            self._board.close()

    def _prepare(self, name: str, fields: tuple[str, ...], first_step: int) -> None:
        """A header, and the lines that stay; the earlier part of the run may have logged other columns."""
        path, text = self.folder / f"{name}.csv", io.StringIO()
        writer = csv.DictWriter(text, fields, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for row in csv.DictReader(_lines(path)) if int(row["step"]) <= first_step)
        write_text_atomically(path, text.getvalue())

    def _write(self, name: str, fields: tuple[str, ...], values: dict[str, float]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow([values[field] for field in fields])
        _append(self.folder / f"{name}.csv", text.getvalue())
        _append(self.folder / "log.jsonl", json.dumps({field: values[field] for field in fields}) + "\n")
        if self._board is not None:
            for field in fields[1:]:
                self._board.add_scalar(field, values[field], int(values["step"]))


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _lines(path: Path) -> list[str]:
    """Whole lines of the file; a last one that a killed run broke off is left out."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


def _tensorboard(folder: Path, first_step: int) -> Any:
    """A writer that hides events after ``first_step`` of an earlier run; None where TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional, and slow to import

    return SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)
