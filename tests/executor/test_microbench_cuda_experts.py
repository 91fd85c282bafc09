"""Which back end's windows a curve of the experts has; the readings themselves need a GPU (test_microbench_cuda.py)."""

from collections.abc import Iterable

import pytest
import torch

from moeplan.executor import microbench_cuda_experts
from moeplan.executor.expert_tuning import LEAST_PRODUCT_S
from moeplan.executor.microbench_cuda_experts import EXPERT_ROWS, SLOW_HOST

SHAPE = E, HIDDEN, WIDTH = 8, 64, 32
PASSES = ("fwd", "wgrad_of_two")
NUM_PRODUCTS = {"fwd": 2 * E, "wgrad_of_two": 4 * E}
CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Of a call of each back end, whatever it computes; a test changes them."""
    found = {"quack_128x192": 1.0, "quack_128x128": 2.0, "triton": 3.0, "triton_rows32": 2.5, "torch": 4.0}
    monkeypatch.setattr(microbench_cuda_experts, "ExpertProduct", lambda *_, **__: None)
    monkeypatch.setattr(
        microbench_cuda_experts, "_passes", lambda _: {phase: dict.fromkeys(found, print) for phase in PASSES}
    )
    return found


@pytest.fixture
def compared(seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Who took part in each comparison."""
    asked: list[set[str]] = []

    def windows(calls: Iterable[str], **_: float) -> dict[str, list[float]]:
        asked.append(set(calls))
        return {name: [seconds[name]] * 2 for name in calls}

    monkeypatch.setattr(microbench_cuda_experts, "windows_under_load", windows)
    return asked


def test_each_packages_fastest_of_the_first_rows_competes_at_the_others(
    seconds: dict[str, float], compared: list[set[str]]
) -> None:
    """Two micro-batches have twice the work."""
    readings = list(microbench_cuda_experts._of_shape(SHAPE, CPU, 0.0))
    kept = {"quack_128x192", "triton_rows32", "torch"}
    assert compared == [set(seconds)] * len(PASSES) + [kept] * len(PASSES) * (len(EXPERT_ROWS) - 1)
    weights = E * HIDDEN * 3 * WIDTH
    assert [(reading.name, reading.size, reading.values) for reading in readings] == [
        (f"grouped_gemm.{backend}.{phase}.{E}", rows, (2 * rows * number * weights / seconds[name],) * 2)
        for rows in EXPERT_ROWS
        for phase, number in zip(PASSES, (1, 2), strict=True)
        for backend, name in (("torch", "triton_rows32"), ("quack", "quack_128x192"))
    ]


def test_a_machine_without_quack_has_no_readings_of_it(seconds: dict[str, float], compared: list[set[str]]) -> None:
    for name in ("quack_128x192", "quack_128x128"):
        del seconds[name]
    readings = list(microbench_cuda_experts._of_shape(SHAPE, CPU, 0.0))
    assert {reading.name.split(".")[1] for reading in readings} == {"torch"}


def test_plans_with_quack_run_what_is_faster_than_it(seconds: dict[str, float], compared: list[set[str]]) -> None:
    seconds["triton"] = 0.5
    readings = {reading.name: reading.values for reading in microbench_cuda_experts._of_shape(SHAPE, CPU, 0.0)}
    assert readings[f"grouped_gemm.quack.fwd.{E}"] == readings[f"grouped_gemm.torch.fwd.{E}"]


@pytest.mark.parametrize("frac, takes_part", [(0.9, {"fwd"}), (1.1, {"fwd", "wgrad_of_two"}), (0.4, set())])
def test_what_leaves_the_host_no_time_is_left_out_where_it_does(
    frac: float,
    takes_part: set[str],
    seconds: dict[str, float],
    compared: list[set[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At some rows: there it is back at the next. Two micro-batches are twice as many launches."""
    limit_s = LEAST_PRODUCT_S * NUM_PRODUCTS["wgrad_of_two"]
    seconds |= {SLOW_HOST: 0.5}
    times_s = iter([0.0, 0.0, *[frac * limit_s] * len(PASSES) * (len(EXPERT_ROWS) - 1)])
    monkeypatch.setattr(microbench_cuda_experts, "cuda_timed", lambda _run, _calls: next(times_s))
    list(microbench_cuda_experts._of_shape(SHAPE, CPU, 0.0))
    first, later = compared[: len(PASSES)], compared[len(PASSES) :]
    assert not any(SLOW_HOST in names for names in first)
    for index, names in enumerate(later):
        assert (SLOW_HOST in names) == (PASSES[index % len(PASSES)] in takes_part)
