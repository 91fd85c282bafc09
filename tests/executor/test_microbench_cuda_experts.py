"""Which back end's windows a curve of the experts has; the readings themselves need a GPU (test_microbench_cuda.py)."""

from collections.abc import Iterable

import pytest
import torch

from moeplan.executor import microbench_cuda_experts
from moeplan.executor.expert_tuning import LEAST_PRODUCT_S
from moeplan.executor.microbench_cuda_experts import EXPERT_ROWS

NUM_PRODUCTS = 16


@pytest.mark.parametrize(
    "by_expert_s,order",
    [
        (0.9 * LEAST_PRODUCT_S * NUM_PRODUCTS, ["torch"]),
        (1.1 * LEAST_PRODUCT_S * NUM_PRODUCTS, ["by_expert", "torch"]),
    ],
)
def test_what_leaves_the_host_no_time_is_not_what_a_run_takes(
    by_expert_s: float, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows_s = {"torch": [by_expert_s * 2, by_expert_s * 3], "by_expert": [by_expert_s]}
    monkeypatch.setattr(microbench_cuda_experts, "windows_under_load", lambda *_, **__: windows_s)
    calls = {name: lambda: None for name in windows_s}
    found = microbench_cuda_experts._by_speed(calls, NUM_PRODUCTS, 0.0)
    assert list(found.items()) == [(name, windows_s[name]) for name in order]


def test_the_only_back_end_is_taken_whatever_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbench_cuda_experts, "windows_under_load", lambda *_, **__: {"by_expert": [1e-6]})
    found = microbench_cuda_experts._by_speed({"by_expert": lambda: None}, NUM_PRODUCTS, 0.0)
    assert found == {"by_expert": [1e-6]}


def test_each_packages_fastest_of_the_first_rows_competes_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches have twice the work."""
    seconds = {"quack_128x192": 1.0, "quack_128x128": 2.0, "triton": 3.0, "triton_rows32": 2.5, "torch": 4.0}
    compared: list[set[str]] = []

    def windows(calls: Iterable[str], **_: float) -> dict[str, list[float]]:
        compared.append(set(calls))
        return {name: [seconds[name]] * 2 for name in calls}

    passes = ("fwd", "wgrad_of_two")
    monkeypatch.setattr(microbench_cuda_experts, "ExpertProduct", lambda *_, **__: None)
    monkeypatch.setattr(microbench_cuda_experts, "windows_under_load", windows)
    monkeypatch.setattr(
        microbench_cuda_experts, "_passes", lambda _: {phase: dict.fromkeys(seconds, print) for phase in passes}
    )
    readings = list(microbench_cuda_experts._of_shape((8, 64, 32), torch.device("cpu"), 0.0))
    weights = 8 * 64 * 3 * 32
    kept = {"quack_128x192", "triton_rows32", "torch"}
    assert compared == [set(seconds)] * len(passes) + [kept] * len(passes) * (len(EXPERT_ROWS) - 1)
    assert [(reading.name, reading.size, reading.values) for reading in readings] == [
        (f"grouped_gemm.{phase}.8", rows, (2 * rows * number * weights,) * 2)
        for rows in EXPERT_ROWS
        for phase, number in zip(passes, (1, 2), strict=True)
    ]
