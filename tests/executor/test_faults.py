"""Runs that are killed or asked to stop, in training and while saving, and what is left to go on from."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from moeplan.errors import InvalidInputError, RunFailedError
from moeplan.executor.checkpoint_files import latest_checkpoint, problem_of, read_manifest
from moeplan.executor.launch import launch
from moeplan.plan import Plan
from moeplan.results import Figures
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, build_trainer, tiny_plan
from tests.executor.run_files import files
from tests.executor.test_export_hf import WIDE
from tests.executor.test_launch import LAUNCH, ROOT, free_port

PLAN = tiny_plan(GQA_MODEL, 2, ep=2, precision="fp32")
EXPORTED = tiny_plan(WIDE, 2, ep=2, precision="fp32")
OTHER = tiny_plan(GQA_MODEL, 2, pp=2, precision="fp32")
SAVE_EVERY = 2
PATIENCE_S = 30


def start(paths: tuple[Path, Path, Path]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *map(str, paths)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(paths[0].parent)},
        stderr=subprocess.PIPE,
        text=True,
    )


def workers(launcher: "subprocess.Popen[str]") -> dict[int, psutil.Process]:
    children = psutil.Process(launcher.pid).children(recursive=True)
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def read_steps(launcher: "subprocess.Popen[str]", number: int) -> int:
    """The number of the last step after reading progress up to it."""
    assert launcher.stderr is not None
    for line in launcher.stderr:
        if line.startswith("step "):
            step = int(line.split()[1].split("/")[0])
            if step >= number:
                return step
    raise AssertionError("the run ended early")


def finish(launcher: "subprocess.Popen[str]", children: list[psutil.Process]) -> tuple[str, int]:
    """The one error line and the last step reported, after checking that nothing is left in time."""
    begin_s = time.monotonic()
    _, text = launcher.communicate(timeout=PATIENCE_S)
    _, alive = psutil.wait_procs(children, timeout=max(0.1, PATIENCE_S - (time.monotonic() - begin_s)))
    assert not alive, f"left behind: {alive}"
    lines = text.splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step ")]
    errors = [line for line in lines if not line.startswith("step ")]
    assert len(errors) == 1, errors
    return errors[0], max(steps, default=0)


def assert_whole(**run: Any) -> int:
    """The step of the latest checkpoint, after checking all of its files and training from it, here and alone."""
    checkpoint = latest_checkpoint(Path(run["save_folder"]))
    manifest = read_manifest(checkpoint, GQA_MODEL)
    assert [problem_of(checkpoint, name, one) for name, one in manifest.files.items()] == [""] * len(manifest.files)
    resumed = RunConfig.model_validate(run | {"steps": manifest.step + 4})
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1, precision="fp32"), resumed)
    trainer.resume()
    assert trainer.first_step == manifest.step
    assert math.isfinite(trainer.step(manifest.step).loss)
    return manifest.step


def assert_resumes(folder: Path, plan: Plan, **run: Any) -> int:
    """As :func:`assert_whole`, by the launcher."""
    manifest = read_manifest(latest_checkpoint(Path(run["save_folder"])), plan.model)
    lines: list[str] = []
    paths = files(folder, plan, **(run | {"steps": manifest.step + 4, "resume": True, **_QUICK}))
    launch(*paths, 2, lines.append)
    assert int(lines[0].split()[1].split("/")[0]) == manifest.step + 1
    figures = Figures.model_validate(json.loads(paths[2].read_text(encoding="utf-8")))
    assert len(figures.losses) == 4
    return manifest.step


_QUICK = {"warmup_steps_untimed": 1, "profile_steps": 1}


def kill_one(folder: Path, seed: int, plan: Plan) -> None:
    """Kill a random rank at a random time, then go on from what is left."""
    draw = random.Random(seed)
    run = {"save_folder": str(folder / "saved"), "save_every": SAVE_EVERY, "save_async": seed % 2 == 0}
    launcher = start(files(folder, plan, steps=10_000, **run))
    # The second save waits for the first, so that by then there is a checkpoint.
    reported = read_steps(launcher, 2 * SAVE_EVERY + 1 + draw.randrange(3))
    ranks = workers(launcher)
    children = psutil.Process(launcher.pid).children(recursive=True)
    victim = draw.randrange(2)
    time.sleep(draw.random() * 0.3)  # a step and a save are of this order
    ranks[victim].kill()
    error, last = finish(launcher, children)
    assert error.startswith(f"error: rank {victim} was killed by SIGKILL after step ")
    step = assert_whole(**run)
    # The step after the last reported may be done as well; a save under way may be lost.
    assert max(reported, last) - 2 * SAVE_EVERY <= step <= max(reported, last) + 1


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_rank_costs_the_steps_since_the_last_save(tmp_path: Path, seed: int) -> None:
    kill_one(tmp_path, seed, OTHER if seed == 2 else PLAN)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 20))
def test_ranks_killed_at_other_times(tmp_path: Path, seed: int) -> None:
    kill_one(tmp_path, seed, OTHER if seed % 3 == 2 else PLAN)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends(tmp_path: Path, number: signal.Signals) -> None:
    run = {"save_folder": str(tmp_path / "saved")}
    launcher = start(files(tmp_path, PLAN, steps=10_000, **run))
    reported = read_steps(launcher, 3)
    children = psutil.Process(launcher.pid).children(recursive=True)
    os.kill(launcher.pid, number)
    error, _ = finish(launcher, children)
    assert error.startswith(f"error: the run was stopped by {number.name} after step ")
    assert error.endswith(f"; its state is in {run['save_folder']}")
    step = assert_whole(**run)
    if number == signal.SIGTERM:
        assert assert_resumes(tmp_path, OTHER, **run) == step
    assert f" after step {step}/10000;" in error
    assert step >= reported
    assert launcher.returncode == RunFailedError.exit_code


def test_what_cannot_be_resumed_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_args, **_kwargs: pytest.fail("a process was started"))
    with pytest.raises(InvalidInputError, match="resume: got True without save_folder"):
        launch(*files(tmp_path, PLAN, resume=True), 2)
    with pytest.raises(InvalidInputError, match="no checkpoint to resume from"):
        launch(*files(tmp_path, PLAN, resume=True, save_folder=str(tmp_path)), 2)


def test_a_resumed_run_takes_the_few_steps_that_are_left_and_exports_when_none_is(tmp_path: Path) -> None:
    run = {"save_folder": str(tmp_path / "saved"), "steps": 6}
    launch(*files(tmp_path, EXPORTED, **run), 2, lambda _line: None)
    with pytest.raises(InvalidInputError, match="holds checkpoints of a run"):
        launch(*files(tmp_path, EXPORTED, **run), 2)
    resumed = run | {"auto_resume": True}
    with pytest.raises(InvalidInputError, match="steps: got 6, of which 6 are done; allowed: more than 6"):
        launch(*files(tmp_path, EXPORTED, **resumed), 2)
    paths = files(tmp_path, EXPORTED, **(resumed | {"steps": 8}))
    lines: list[str] = []
    assert launch(*paths, 2, lines.append)
    assert [line.split()[1] for line in lines] == ["7/8", "8/8"]
    assert len(Figures.model_validate(json.loads(paths[2].read_text(encoding="utf-8"))).step_times_s) == 1
    paths[2].unlink()
    exported = resumed | {"steps": 8, "export_hf": str(tmp_path / "hf")}
    assert not launch(*files(tmp_path, EXPORTED, **exported), 2)
    assert (tmp_path / "hf" / "config.json").exists()
    assert not paths[2].exists()


@pytest.mark.slow
def test_ranks_that_torchrun_starts_anew_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    run = {"steps": 30, "save_folder": str(tmp_path / "saved"), "save_every": 2, "log_folder": str(tmp_path / "log")}
    plan_path, run_path, out = files(tmp_path, PLAN, **run)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "-m", "moeplan.executor.worker"]
    command += [str(plan_path), "--run-config", str(run_path), "--out", str(out)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as agent:
        read_steps(agent, 5)
        workers(agent)[1].kill()
        _, text = agent.communicate(timeout=300)
    assert agent.returncode == 0, text
    assert "step 1/30" not in text
    steps = [line.split(",")[0] for line in (tmp_path / "log" / "steps.csv").read_text(encoding="utf-8").splitlines()]
    assert steps == ["step", *map(str, range(1, 31))]
    assert out.exists()
