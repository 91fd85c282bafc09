"""Files of a run's log."""

import csv
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InvalidInputError
from moeplan.executor import step_log
from moeplan.executor.step_log import BUSIEST_LOAD, STEP_FIELDS, StepLog, check_log_folder


def values(step: int) -> dict[str, float]:
    return {name: step + index / 10 for index, name in enumerate(STEP_FIELDS)} | {"step": step}


def steps_in(folder: Path) -> tuple[list[int], list[int]]:
    with (folder / "steps.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [int(row["step"]) for row in rows], [line["step"] for line in lines]


def test_a_resumed_run_takes_back_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    first = StepLog(tmp_path, 0)
    for step in (1, 2, 3, 4):
        first.step(values(step))
    first.validation(4, 2.5)
    # As a killed run may leave it.
    with (tmp_path / "steps.csv").open("a", encoding="utf-8") as file:
        file.write("5,3.")
    again = StepLog(tmp_path, 3)
    again.step(values(4))
    again.validation(4, 2.0)
    assert steps_in(tmp_path) == ([1, 2, 3, 4], [1, 2, 3, 4, 4])
    assert (tmp_path / "validation.csv").read_text(encoding="utf-8") == "step,validation_loss\n4,2.0\n"


def test_a_resumed_run_may_log_another_column(tmp_path: Path) -> None:
    StepLog(tmp_path, 0).step(values(1))
    StepLog(tmp_path, 1, has_balance=True).step(values(2) | {BUSIEST_LOAD: 1.5})
    with (tmp_path / "steps.csv").open(encoding="utf-8", newline="") as file:
        assert [row[BUSIEST_LOAD] for row in csv.DictReader(file)] == ["", "1.5"]
    StepLog(tmp_path, 2).step(values(3))
    rows = (tmp_path / "steps.csv").read_text(encoding="utf-8").splitlines()
    assert rows[0] == ",".join(STEP_FIELDS)
    assert [row.count(",") for row in rows] == [len(STEP_FIELDS) - 1] * 4


def test_a_log_of_another_run_is_not_overwritten(tmp_path: Path) -> None:
    check_log_folder(tmp_path / "new", resume=False)
    StepLog(tmp_path, 0)
    with pytest.raises(InvalidInputError, match="holds the log of a run"):
        check_log_folder(tmp_path, resume=False)
    check_log_folder(tmp_path, resume=True)
    with pytest.raises(InvalidInputError, match="is a file"):
        check_log_folder(tmp_path / "steps.csv", resume=True)


def test_tensorboard_gets_each_figure_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer:
        made: list["Writer"] = []  # noqa: RUF012 - this test alone fills it

        def __init__(self, folder: str, purge_step: int | None) -> None:
            self.folder, self.purge_step, self.closed = folder, purge_step, False
            self.scalars: list[Any] = []
            Writer.made.append(self)

        def add_scalar(self, *scalar: Any) -> None:
            self.scalars.append(scalar)

        def close(self) -> None:
            self.closed = True

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(step_log, "find_spec", lambda _name: object())
    log = StepLog(tmp_path, 7)
    log.step(values(8))
    log.close()
    (writer,) = Writer.made
    assert (writer.folder, writer.purge_step, writer.closed) == (str(tmp_path), 8, True)
    assert [scalar[0] for scalar in writer.scalars] == list(STEP_FIELDS[1:])
    assert {scalar[2] for scalar in writer.scalars} == {8}
