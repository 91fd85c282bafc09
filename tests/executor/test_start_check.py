"""What is refused before a rank trains, whoever starts it, and how a run finds out that it goes on."""

from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InvalidInputError
from moeplan.executor.checkpoint_files import LATEST
from moeplan.executor.start_check import check_start, settled, shortened
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, tiny_plan

PLAN = tiny_plan(GQA_MODEL, 1)


def check(folder: Path, **run: Any) -> None:
    check_start(PLAN, RunConfig.model_validate(run), 1, folder / "out" / "measurement.json")


@pytest.mark.parametrize("key", ["save_folder", "log_folder", "record_routing"])
def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(tmp_path: Path, key: str) -> None:
    check(tmp_path, **{key: str(tmp_path / "new" / "folder")})
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="file"):
        check(tmp_path, **{key: str(tmp_path / "file")})
    with pytest.raises(InvalidInputError, match=f"{key} /proc/none: cannot be written"):
        check(tmp_path, **{key: "/proc/none"})


def test_a_measurement_that_cannot_be_written_is_found_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x", encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"cannot write .*measurement\.json"):
        check(tmp_path)


def test_checkpoints_of_another_run_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    (tmp_path / LATEST).write_text("step-00000004\n", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="holds checkpoints of a run") as caught:
        check(tmp_path, save_folder=str(tmp_path))
    assert "resume" in caught.value.hint


@pytest.mark.parametrize(
    "alone, other",
    [
        ({"skip_spikes": True}, {"spike_factor": 3.0}),
        ({"lr_cooldown_steps": 3}, {"lr_schedule": "wsd"}),
        ({"eval_data": "DATA"}, {"eval_every": 3}),
    ],
)
def test_a_setting_that_does_nothing_alone_is_refused(
    tmp_path: Path, alone: dict[str, Any], other: dict[str, Any]
) -> None:
    (tmp_path / "data").write_bytes(bytes(100))
    alone = {key: str(tmp_path / "data") if value == "DATA" else value for key, value in alone.items()}
    check(tmp_path, **alone, **other)
    with pytest.raises(InvalidInputError, match=f"{next(iter(alone))}: got .* without {next(iter(other))}"):
        check(tmp_path, **alone)


def test_a_run_goes_on_where_it_may_and_there_is_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = RunConfig(save_folder=str(tmp_path))
    auto = plain.model_copy(update={"auto_resume": True})
    assert not settled(auto).resume
    (tmp_path / LATEST).write_text("step-00000004\n", encoding="utf-8")
    assert settled(auto).resume
    assert not settled(plain).resume
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert settled(plain).resume
    assert not settled(RunConfig()).resume


def test_a_restarted_run_writes_its_log_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps.csv").write_text("step\n", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="holds the log of a run"):
        check(tmp_path, log_folder=str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    check(tmp_path, log_folder=str(tmp_path))


@pytest.mark.parametrize("first_step, expected", [(0, (3, 2)), (4, (3, 2)), (5, (4, 0)), (9, (0, 0))])
def test_the_last_steps_of_a_resumed_run_are_timed_where_one_can_be(first_step: int, expected: tuple[int, int]) -> None:
    run = shortened(RunConfig(steps=10), first_step)
    assert (run.warmup_steps_untimed, run.profile_steps) == expected
