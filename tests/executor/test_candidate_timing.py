"""Comparing candidates on a GPU whose clock follows the power that its calls draw: a model of it, without waiting."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from moeplan.executor import candidate_timing
from moeplan.executor.candidate_timing import NUM_ROUNDS, WARM_UP_S, Timer, compare, cuda_timed, runnable, under_load

LIMIT_W = 700.0
LAG_S = 0.03  # in which the power limit follows what runs


@dataclass
class FakeGpu:
    """A call of a kernel takes its seconds at full clock times power over limit, on the power of the last 0.03 s."""

    watts: float = 100.0
    now_s: float = 0.0
    slowdown_per_s: float = 0.0
    calls: list[str] = field(default_factory=list)

    def kernel(self, name: str, seconds: float, watts: float) -> Callable[[], None]:
        def run() -> None:
            self.calls.append(name)
            taken_s = seconds * max(1.0, self.watts / LIMIT_W) * (1 + self.slowdown_per_s * self.now_s)
            part = min(1.0, taken_s / LAG_S)
            self.watts += part * (watts - self.watts)
            self.now_s += taken_s

        return run

    def timed(self, run: Callable[[], object], num_calls: int) -> float:
        start_s = self.now_s
        for _ in range(num_calls):
            run()
        return (self.now_s - start_s) / num_calls


def _turns(timed: Timer, candidates: dict[str, Callable[[], None]]) -> dict[str, float]:
    """A few calls of each in turn: what does not work."""
    totals = dict.fromkeys(candidates, 0.0)
    for _ in range(200):
        for name, run in candidates.items():
            totals[name] += timed(run, 3)
    return totals


def test_what_draws_more_power_than_it_may_is_found_slower() -> None:
    gpu = FakeGpu()
    # Alone for long the hungry one takes 1.2 times its seconds, the lean one all of its 1.1.
    candidates = {"hungry": gpu.kernel("hungry", 1e-3, 840.0), "lean": gpu.kernel("lean", 1.1e-3, 700.0)}
    first = {name: gpu.timed(run, 1) for name, run in candidates.items()}
    assert first["hungry"] < first["lean"]
    turns = _turns(gpu.timed, candidates)
    assert turns["hungry"] < turns["lean"]
    times_s = under_load(candidates, gpu.timed)
    assert times_s == pytest.approx({"hungry": 1.2e-3, "lean": 1.1e-3}, rel=0.005)


def test_an_idle_gpu_is_loaded_first() -> None:
    gpu = FakeGpu()
    runs = {name: gpu.kernel(name, 1e-3, 700.0) for name in ("a", "b")}
    started_s: list[float] = []

    def timed(run: Callable[[], object], num_calls: int) -> float:
        started_s.append(gpu.now_s)
        return gpu.timed(run, num_calls)

    under_load(runs, timed)
    windows = 2 * 2 * NUM_ROUNDS  # two candidates, each settled and timed
    assert started_s[-windows] >= WARM_UP_S


def test_a_gpu_that_warms_up_favours_nobody() -> None:
    gpu = FakeGpu(slowdown_per_s=0.01)
    times_s = under_load({str(index): gpu.kernel(str(index), 1e-3, 700.0) for index in range(6)}, gpu.timed)
    # One after the other the last would begin 1.25 s after the first in each of three windows: 4 %.
    assert max(times_s.values()) / min(times_s.values()) < 1.015


def test_the_hopeless_run_in_one_round_alone() -> None:
    gpu = FakeGpu()
    seconds = {"slow": 2e-3, "fast": 1e-3, "near": 1.05e-3}
    times_s = under_load({name: gpu.kernel(name, one, 700.0) for name, one in seconds.items()}, gpu.timed)
    assert times_s == pytest.approx(seconds)
    tail = gpu.calls[-4 * 200 :]
    assert "slow" not in tail
    assert {"fast", "near"} <= set(tail)


def test_a_single_candidate_needs_no_warm_up() -> None:
    gpu = FakeGpu()
    assert under_load({"only": gpu.kernel("only", 1e-3, 700.0)}, gpu.timed) == pytest.approx({"only": 1e-3})
    assert gpu.now_s < WARM_UP_S


@pytest.mark.gpu
def test_the_longer_of_two_takes_longer() -> None:
    x = torch.randn(2048, 2048, device="cuda")
    candidates: dict[str, Callable[[], object]] = {"short": lambda: x + 1, "long": lambda: [x @ x for _ in range(5)]}
    times_s = under_load(candidates)
    assert 0 < times_s["short"] < times_s["long"]
    assert cuda_timed(lambda: x + 1, 3) > 0


def test_what_does_not_run_is_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("no such library")

    gpu = FakeGpu()
    works = gpu.kernel("works", 1e-3, 100.0)
    with pytest.warns(RuntimeWarning, match=r"other is left out.*no such library"):
        assert list(runnable({"works": works, "other": broken})) == ["works"]
    monkeypatch.setattr(candidate_timing, "cuda_timed", gpu.timed)
    with pytest.warns(RuntimeWarning):
        assert compare({"works": works, "other": broken}) == pytest.approx({"works": 1e-3, "other": math.inf})
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="none of other runs here"):
        runnable({"other": broken})
