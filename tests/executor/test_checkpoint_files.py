"""Which checkpoints stay in a run's folder."""

import os
import shutil
from pathlib import Path

import pytest

from moeplan.executor.checkpoint_files import (
    LATEST,
    Manifest,
    begin_saving,
    finish_saving,
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
