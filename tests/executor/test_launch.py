"""Runs through torchrun: figures, failures that name the rank, and no process left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from moeplan.errors import InvalidInputError, RunFailedError
from moeplan.executor.failure import RESUME_PREFIX
from moeplan.executor.launch import Rendezvous, launch
from moeplan.results import Figures
from moeplan.run_environment import ALLOCATOR_VARIABLE, GROWING_SEGMENTS
from tests.executor.cases import GQA_MODEL, tiny_plan
from tests.executor.run_files import files

ROOT = Path(__file__).parents[2]
PLAN = tiny_plan(GQA_MODEL, 2, ep=2, precision="fp32")
# A killed run must be gone well within half a minute, its start not counted.
PATIENCE_S = 20
LAUNCH = """
import sys
from pathlib import Path
from moeplan.errors import MoeplanError
from moeplan.executor.launch import launch
try:
    launch(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), 2)
except MoeplanError as error:
    sys.stderr.write(f"error: {error.message}\\n")
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("given", ["", "max_split_size_mb:512"])
def test_workers_get_segments_that_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    seen: dict[str, str] = {}

    def start(_command: list[str], *, env: dict[str, str], **_options: object) -> None:
        seen.update(env)
        raise FileNotFoundError

    monkeypatch.delenv(ALLOCATOR_VARIABLE, raising=False)
    if given:
        monkeypatch.setenv(ALLOCATOR_VARIABLE, given)
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(FileNotFoundError):
        launch(*files(tmp_path, PLAN), 2)
    assert seen[ALLOCATOR_VARIABLE] == (given or GROWING_SEGMENTS)


def test_a_run_writes_its_figures_and_reports_each_step(tmp_path: Path) -> None:
    plan_path, run_path, out_path = files(tmp_path, PLAN, steps=7, log_every=3)
    lines: list[str] = []
    launch(plan_path, run_path, out_path, 2, lines.append)
    assert [line.split()[1] for line in lines] == ["3/7", "6/7", "7/7"]
    figures = Figures.model_validate(json.loads(out_path.read_text(encoding="utf-8")))
    assert figures.plan_id == PLAN.plan_id
    assert len(figures.losses) == 7
    assert len(figures.step_times_s) == 7 - 3 - 2
    assert min(figures.step_times_s) <= figures.step_s <= max(figures.step_times_s)
    assert figures.tokens_per_s_per_gpu == pytest.approx(PLAN.tokens_per_step / figures.step_s / 2)
    sums = {category: values[0] for category, values in figures.memory_bytes.items()}
    assert figures.peak_memory_bytes == sum(sums.values())
    assert min(sums[name] for name in ("weights", "gradients", "optimizer", "framework")) > 0
    assert {"attention", "dense_gemm", "expert_gemm", "dispatch", "dp_comm", "optimizer"} <= set(figures.time_s)


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_args, **_kwargs: pytest.fail("a process was started"))
    for num_processes, run, message in (
        (4, {}, "processes: got 4 for a plan of 2 GPUs"),
        (2, {"steps": 3}, "steps: got 3"),
        (2, {"data": str(tmp_path / "none.bin")}, "file not found"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            launch(*files(tmp_path, PLAN, **run), num_processes)


def test_hosts_meet_and_the_one_of_rank_0_has_the_measurement(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    hosts = [files_in(tmp_path / name) for name in ("first", "second")]
    lines: list[list[str]] = [[], []]

    def host(number: int) -> bool:
        return launch(*hosts[number], 2, lines[number].append, rendezvous=Rendezvous(2, endpoint, "test"))

    with ThreadPoolExecutor(2) as threads:
        has_measured = list(threads.map(host, range(2)))
    assert sorted(has_measured) == [False, True]
    assert [paths[2].exists() for paths in hosts] == has_measured
    assert [len(some) for some in lines] == [7 * has for has in has_measured]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def files_in(folder: Path) -> tuple[Path, Path, Path]:
    folder.mkdir()
    return files(folder, PLAN, steps=7, log_folder=str(folder / "log"))


def test_hosts_that_cannot_share_the_plan_are_refused(tmp_path: Path) -> None:
    paths = files(tmp_path, PLAN)
    with pytest.raises(InvalidInputError, match="nnodes: got 3 for a plan of 2 GPUs"):
        launch(*paths, 2, rendezvous=Rendezvous(3, "a:1"))
    with pytest.raises(InvalidInputError, match="rdzv-endpoint: got 'node0', allowed: host:port"):
        launch(*paths, 2, rendezvous=Rendezvous(2, "node0"))
    with pytest.raises(InvalidInputError, match="rdzv-endpoint: got 'node0:99999', allowed: host:port"):
        launch(*paths, 2, rendezvous=Rendezvous(2, "node0:99999"))


def test_a_rank_that_meets_a_foreign_token_says_so(tmp_path: Path) -> None:
    data = tmp_path / "ids.bin"
    data.write_bytes(b"\x01\x00" * 15 + b"\xff\xff" + b"\x01\x00")
    with pytest.raises(InvalidInputError, match=r"ids\.bin: token id 65535 at position 15") as caught:
        launch(*files(tmp_path, PLAN, data=str(data)), 2, lambda _line: None)
    assert caught.value.exit_code == 2


def start(paths: tuple[Path, Path, Path]) -> "tuple[subprocess.Popen[str], list[psutil.Process]]":
    """A launcher in a process of its own, in its first steps, and the worker processes by rank."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *map(str, paths)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(paths[0].parent)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stderr is not None
    assert launcher.stderr.readline().startswith("step 1/")
    children = psutil.Process(launcher.pid).children(recursive=True)
    workers = {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}
    assert sorted(workers) == [0, 1]
    return launcher, [workers[0], workers[1], *(child for child in children if child not in workers.values())]


def finish(launcher: "subprocess.Popen[str]", children: list[psutil.Process]) -> str:
    """What the launcher said last, after checking that all went in time and nothing is left."""
    begin_s = time.monotonic()
    _, text = launcher.communicate(timeout=PATIENCE_S)
    _, alive = psutil.wait_procs(children, timeout=max(0.1, PATIENCE_S - (time.monotonic() - begin_s)))
    assert not alive, f"left behind: {alive}"
    errors = [line for line in text.splitlines() if not line.startswith("step ")]
    assert len(errors) == 1, errors
    assert launcher.returncode == RunFailedError.exit_code
    return errors[0]


def test_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    launcher, children = start(files(tmp_path, PLAN, steps=10_000))
    children[1].kill()
    assert finish(launcher, children).startswith("error: rank 1 was killed by SIGKILL after step ")


ABORTED = """terminate called after throwing an instance of 'std::system_error'
  what():  Invalid argument
E1129 20:41:07.100000 5413 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: -6) local_rank: 1
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -6 (pid: 5416)
============================================================
"""


def test_a_rank_that_aborts_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, real = tmp_path / "log", subprocess.Popen
    log.write_text(ABORTED, encoding="utf-8")
    command = ["sh", "-c", f"cat '{log}' >&2; exit 1"]
    monkeypatch.setattr(subprocess, "Popen", lambda _torchrun, **options: real(command, **options))
    with pytest.raises(RunFailedError, match="rank 1 was killed by SIGABRT before the first step") as raised:
        launch(*files(tmp_path, PLAN), 2)
    assert raised.value.hint == "the end of its log:\n" + "\n".join(ABORTED.splitlines()[:2])


def test_what_a_run_could_not_go_on_from_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, real = [f"{RESUME_PREFIX}left out: a", "step 5/6  loss 1"], subprocess.Popen
    (tmp_path / "log").write_text("\n".join([*said, "a warning"]), encoding="utf-8")
    command = ["sh", "-c", f"cat '{tmp_path / 'log'}' >&2"]
    monkeypatch.setattr(subprocess, "Popen", lambda _torchrun, **options: real(command, **options))
    lines: list[str] = []
    launch(*files(tmp_path, PLAN), 2, lines.append)
    assert lines == said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    launcher, children = start(files(tmp_path, PLAN, steps=10_000))
    os.kill(launcher.pid, number)
    assert finish(launcher, children).startswith(f"error: the run was stopped by {number.name} after step ")


def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    launcher, children = start(files(tmp_path, PLAN, steps=10_000))
    launcher.kill()
    launcher.communicate(timeout=PATIENCE_S)
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive, f"left behind: {alive}"
