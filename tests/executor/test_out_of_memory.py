"""A rank that runs out of memory says what it held; the launcher passes that on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moeplan.errors import OutOfMemoryError, RunFailedError
from moeplan.executor import launch as launch_module
from moeplan.executor import worker
from moeplan.executor.failure import RUN_FOLDER_VARIABLE, Failure, read_failures, write_failure
from moeplan.executor.out_of_memory import is_out_of_memory, memory_explained
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, build_trainer, tiny_plan

CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.1 GiB"


def run_out(text: str = CUDA_TEXT) -> OutOfMemoryError:
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1), RunConfig())
    with pytest.raises(OutOfMemoryError) as caught, memory_explained(3, trainer, 0):
        raise torch.OutOfMemoryError(text)
    return caught.value


def test_peak_by_category_with_what_was_asked_for() -> None:
    error, plain = run_out(), run_out("CUDA error: out of memory")
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1), RunConfig())
    for category, own in (("weights", "weight_bytes"), ("gradients", "grad_bytes"), ("optimizer", "state_bytes")):
        assert error.memory_bytes[category] == getattr(trainer.optimizer, own)
    asked = error.memory_bytes["activations"] - plain.memory_bytes["activations"]
    assert asked == pytest.approx(2.5 * 2**30, abs=64 * 2**20)  # both read the peak of the process
    assert error.message.startswith("rank 3 ran out of memory: it needed at least ")
    assert "weights " in error.message
    assert "recompute" in error.hint
    assert isinstance(error, RunFailedError)


def test_other_errors_pass() -> None:
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1), RunConfig())
    with pytest.raises(KeyError), memory_explained(0, trainer, 0):
        raise KeyError("weights")
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("memory"))


def test_worker_and_launcher_pass_the_figures_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    error = run_out()
    assert write_failure(worker._describe(error, 3))
    (failure,) = read_failures(tmp_path)
    assert failure.kind == "known"
    raised = launch_module._failure_of(tmp_path, "", "after step 2/9")
    assert isinstance(raised, OutOfMemoryError)
    assert raised.memory_bytes == error.memory_bytes
    assert raised.message == error.message


def test_before_the_trainer_there_are_no_figures() -> None:
    failure = worker._describe(torch.OutOfMemoryError(CUDA_TEXT), 1)
    assert (failure.kind, failure.memory_bytes) == ("known", {})
    assert "before the first step" in failure.message


def test_failures_of_older_files_have_no_figures(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"rank": 0, "kind": "known", "message": "m", "hint": "h", "exit_code": 1, "time_s": 1.0}
    (tmp_path / "rank0.json").write_text(json.dumps(fields), encoding="utf-8")
    assert read_failures(tmp_path) == [Failure(**fields)]
