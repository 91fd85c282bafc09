"""Which back end's windows a curve of the experts has; the readings themselves need a GPU (test_microbench_cuda.py)."""

import pytest

from moeplan.executor import microbench_cuda_experts
from moeplan.executor.kernel_tuning import LEAST_PRODUCT_S

NUM_PRODUCTS = 16


@pytest.mark.parametrize(
    "by_expert_s,fastest",
    [(0.9 * LEAST_PRODUCT_S * NUM_PRODUCTS, "torch"), (1.1 * LEAST_PRODUCT_S * NUM_PRODUCTS, "by_expert")],
)
def test_what_leaves_the_host_no_time_is_not_what_a_run_takes(
    by_expert_s: float, fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows_s = {"torch": [by_expert_s * 2, by_expert_s * 3], "by_expert": [by_expert_s]}
    monkeypatch.setattr(microbench_cuda_experts, "windows_under_load", lambda *_, **__: windows_s)
    calls = {name: lambda: None for name in windows_s}
    assert microbench_cuda_experts._fastest_windows(calls, NUM_PRODUCTS, 0.0) == windows_s[fastest]


def test_the_only_back_end_is_taken_whatever_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbench_cuda_experts, "windows_under_load", lambda *_, **__: {"by_expert": [1e-6]})
    assert microbench_cuda_experts._fastest_windows({"by_expert": lambda: None}, NUM_PRODUCTS, 0.0) == [1e-6]
