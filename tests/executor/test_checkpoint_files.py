"""Which checkpoints stay in a run's folder."""

import os
import shutil
from pathlib import Path

import pytest

from moeplan.errors import InvalidInputError
from moeplan.executor.checkpoint_files import (
    LATEST,
    DamagedCheckpointError,
    Manifest,
    begin_saving,
    checkpoints_to_try,
    finish_saving,
    first_manifest,
    has_checkpoint,
    latest_checkpoint,
    read_manifest,
)
from tests.executor.cases import GQA_MODEL


def save(folder: Path, step: int, num_kept: int) -> None:
    manifest = Manifest(step=step, model=GQA_MODEL, plan_id="p", num_gpus=1, precision="fp32", seed=0, data="", rng="")
    place = begin_saving(folder, step)
    (place / "__0_0.distcp").write_bytes(b"x")
    target = finish_saving(place, manifest, num_kept)
    os.utime(target / "manifest.json", ns=(step, step))  # their order, on file systems with coarse times too


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("num_kept, left", [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_stay(tmp_path: Path, num_kept: int, left: list[int]) -> None:
    for step in range(1, 5):
        save(tmp_path, step, num_kept)
    assert names(tmp_path) == [LATEST, *(f"step-{step:08d}" for step in left)]
    assert read_manifest(latest_checkpoint(tmp_path), GQA_MODEL).step == 4


def test_one_that_was_half_removed_is_none_and_goes_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda *_args, **_kwargs: None)  # as if killed there
    save(tmp_path, 2, 1)
    monkeypatch.undo()
    assert names(tmp_path) == [".saving-old-step-00000001", LATEST, "step-00000002"]
    save(tmp_path, 3, 1)
    assert names(tmp_path) == [LATEST, "step-00000003"]


def tried(folder: Path) -> list[str]:
    return [path.name for path in checkpoints_to_try(folder)]


def test_after_the_latest_come_older_ones_but_none_that_was_left_behind(tmp_path: Path) -> None:
    for step in (2, 4, 4, 10):
        save(tmp_path, step, 0)
    older = ["step-00000004-2", "step-00000004", "step-00000002"]
    assert tried(tmp_path) == ["step-00000010", *older]
    (tmp_path / LATEST).write_text("step-00000004-2\n", encoding="utf-8")  # whoever goes back does not want 10
    assert tried(tmp_path) == older
    (tmp_path / LATEST).write_text("a copy\n", encoding="utf-8")
    assert tried(tmp_path) == ["a copy", "step-00000010", *older]
    (tmp_path / LATEST).unlink()
    assert has_checkpoint(tmp_path)
    assert tried(tmp_path) == ["step-00000010", *older]


def test_a_broken_manifest_is_passed_by_where_that_is_asked_for(tmp_path: Path) -> None:
    for step in (2, 4):
        save(tmp_path, step, 0)
    (tmp_path / "step-00000004" / "manifest.json").write_text("{", encoding="utf-8")
    assert first_manifest(tmp_path, GQA_MODEL, falls_back=True).step == 2
    with pytest.raises(DamagedCheckpointError, match=r"step-00000004/manifest.json is not valid JSON"):
        first_manifest(tmp_path, GQA_MODEL, falls_back=False)
    shutil.rmtree(tmp_path / "step-00000002")
    with pytest.raises(DamagedCheckpointError, match=r"step-00000004/manifest.json is not valid JSON"):
        first_manifest(tmp_path, GQA_MODEL, falls_back=True)
    with pytest.raises(InvalidInputError, match="no checkpoint to resume from"):
        first_manifest(tmp_path / "none", GQA_MODEL, falls_back=True)
