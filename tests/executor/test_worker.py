"""What one rank refuses before it joins the others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeplan.errors import InvalidInputError
from moeplan.executor import worker


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert worker._device(5) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InvalidInputError, match="rank 6 needs GPU 2 of this host, which has 2") as caught:
        worker._device(6)
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint


def test_a_rank_that_nobody_started_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InvalidInputError, match=r"RANK.* is not set") as caught:
        worker._world()
    assert "torchrun" in caught.value.hint


def test_the_first_rank_says_which_checkpoints_are_damaged(capsys: pytest.CaptureFixture[str]) -> None:
    trainer: Any = SimpleNamespace(checkpoints=SimpleNamespace(skipped=["a is cut"]), first_step=4)
    worker._report_skipped(trainer, 1)
    assert not capsys.readouterr().err
    worker._report_skipped(trainer, 0)
    said = "resume: left out: a is cut\nresume: goes on after step 4, from the newest whole checkpoint\n"
    assert capsys.readouterr().err == said
    trainer.checkpoints.skipped = []
    worker._report_skipped(trainer, 0)
    assert not capsys.readouterr().err
