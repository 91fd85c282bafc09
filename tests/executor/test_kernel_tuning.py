"""Choices of back ends: what is tuned, remembered and taken up again. Timing itself needs a GPU."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moeplan.executor import kernel_tuning
from moeplan.executor.expert_tuning import LEAST_PRODUCT_S, expert_shapes
from moeplan.executor.kernel_tuning import FOLDER_VARIABLE, cache_path, tune
from moeplan.executor.mesh import build_mesh
from moeplan.kernels import grouped_gemm_quack
from moeplan.kernels.back_end_choice import choices, forget
from moeplan.plan import Plan
from tests.executor.cases import GQA_MODEL, tiny_plan

PLAN = tiny_plan(GQA_MODEL, 1, precision="bf16")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    forget()
    yield
    forget()  # other tests train without a GPU


def test_a_cpu_keeps_the_defaults() -> None:
    tune(PLAN, build_mesh(PLAN.folding, 0), torch.device("cpu"))
    assert choices() == {}
    assert not cache_path().exists()


def test_the_fastest_is_chosen_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, ...]] = []

    def measure(shape: tuple[int, ...], *_: object, **__: object) -> dict[str, dict[str, float]]:
        measured.append(shape)
        return {
            "grouped_gemm": {"torch": 2.0, "by_expert": 1.0},
            "grouped_input_grad": {"torch": 1.0, "by_expert": 2.0},
            "grouped_weight_grad": {"torch": 2.0, "triton": 3.0},
        }

    monkeypatch.setattr(kernel_tuning, "measure_experts", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    mesh, device = build_mesh(PLAN.folding, 0), torch.device("cuda", 0)
    reports: list[str] = []
    tune(PLAN, mesh, device, report=reports.append)
    assert len(reports) == 2
    assert all(report.startswith("timing kernels for a GPU") for report in reports)
    chosen = {(name.split()[0], backend) for name, backend in choices().items()}
    assert chosen == {("grouped_gemm", "by_expert"), ("grouped_input_grad", "torch"), ("grouped_weight_grad", "torch")}
    assert len(choices()) == 6
    assert len(json.loads(cache_path().read_text())) == 2
    before = choices()
    forget()
    tune(PLAN, mesh, device, report=reports.append)
    assert len(reports) == 2
    assert choices() == before
    assert len(measured) == 2


@pytest.mark.parametrize(
    "plan",
    [
        PLAN.replace(cuda_graph=("full_iteration",)),
        tiny_plan(GQA_MODEL, 2, ep=2, precision="bf16", ep_overlap=True),
    ],
)
def test_what_waits_for_the_device_is_not_chosen_where_nothing_may(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    by_expert_s = 2 * LEAST_PRODUCT_S * expert_shapes(PLAN, build_mesh(PLAN.folding, 0))[0][0]
    times_s = {"grouped_gemm": {"torch": 2 * by_expert_s, "by_expert": by_expert_s}}
    monkeypatch.setattr(kernel_tuning, "measure_experts", lambda *_, **__: times_s)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert set(tune(plan, build_mesh(plan.folding, 0), torch.device("cuda", 0)).values()) == {"torch"}


@pytest.mark.parametrize("frac, chosen", [(0.9, "torch"), (1.1, "by_expert")])
def test_one_launch_an_expert_needs_long_products(frac: float, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's time by expert leaves out what the host does beside it, so it must be well above a launch each."""
    first = expert_shapes(PLAN, build_mesh(PLAN.folding, 0))[0]
    by_expert_s = frac * LEAST_PRODUCT_S * first[0]
    times_s = {"grouped_gemm": {"torch": 2 * by_expert_s, "by_expert": by_expert_s}}
    monkeypatch.setattr(kernel_tuning, "measure_experts", lambda *_, **__: times_s)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    found = tune(PLAN, build_mesh(PLAN.folding, 0), torch.device("cuda", 0))
    assert found["grouped_gemm " + "x".join(map(str, first))] == chosen


@pytest.mark.parametrize("frac, chosen", [(0.9, "torch"), (1.1, "by_expert")])
def test_two_micro_batches_are_twice_the_launches(frac: float, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = build_mesh(PLAN.folding, 0)
    by_expert_s = frac * 2 * LEAST_PRODUCT_S * expert_shapes(PLAN, mesh)[0][0]
    times_s = {"torch": 2 * by_expert_s, "by_expert": by_expert_s}
    monkeypatch.setattr(
        kernel_tuning, "measure_experts", lambda *_, **__: {"grouped_gemm": times_s, "grouped_weight_grad": times_s}
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    found = tune(PLAN.replace(paired_wgrad=("expert_fc1", "expert_fc2")), mesh, torch.device("cuda", 0))
    assert {backend for name, backend in found.items() if name.startswith("grouped_weight_grad")} == {chosen}
    assert {backend for name, backend in found.items() if name.startswith("grouped_gemm")} == {"by_expert"}


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_cache_is_made_anew(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_path().write_text(content)
    monkeypatch.setattr(kernel_tuning, "measure_experts", lambda *_, **__: {"grouped_gemm": {"torch": 1.0}})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    tune(PLAN, build_mesh(PLAN.folding, 0), torch.device("cuda", 0))
    assert set(choices().values()) == {"torch"}
    assert len(json.loads(cache_path().read_text())) == 2


def test_a_deterministic_run_keeps_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fastest when one run measured need not be so when the next does."""
    monkeypatch.setattr(
        kernel_tuning, "measure_experts", lambda *_, **__: {"grouped_gemm": {"torch": 2.0, "by_expert": 1.0}}
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert tune(PLAN, build_mesh(PLAN.folding, 0), torch.device("cuda", 0), deterministic=True) == {}
    assert choices() == {}


def test_a_folder_that_cannot_be_written_ends_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    monkeypatch.setattr(kernel_tuning, "measure_experts", lambda *_, **__: {"grouped_gemm": {"torch": 1.0}})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert set(tune(PLAN, build_mesh(PLAN.folding, 0), torch.device("cuda", 0)).values()) == {"torch"}


def test_names_that_another_version_left_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = {
        "grouped_gemm": {"gone": 1.0, "torch": 2.0},
        "grouped_weight_grad": {"gone": 1.0},
        "gone": {"torch": 1.0},
    }
    monkeypatch.setattr(kernel_tuning, "measure_experts", lambda *_, **__: times_s)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    found = tune(PLAN, build_mesh(PLAN.folding, 0), torch.device("cuda", 0))
    assert [(name.split()[0], backend) for name, backend in found.items()] == [("grouped_gemm", "torch")] * 2


def test_a_pair_of_gradients_is_timed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, int] = {}

    def measure(
        shape: tuple[int, ...], _rows: int, _device: object, num_added: int, **_: bool
    ) -> dict[str, dict[str, float]]:
        asked["x".join(map(str, shape))] = num_added
        return {"grouped_weight_grad": {"triton": 1.0}}

    monkeypatch.setattr(kernel_tuning, "measure_experts", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    mesh, device = build_mesh(PLAN.folding, 0), torch.device("cuda", 0)
    first, second = ("x".join(map(str, shape)) for shape in expert_shapes(PLAN, mesh))
    tune(PLAN.replace(paired_wgrad=("expert_fc2",)), mesh, device)
    assert asked == {first: 1, second: 2}
    asked.clear()
    tune(PLAN, mesh, device)
    assert asked == {second: 1}


def test_a_plan_that_may_not_take_quack_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its comparison is one of its own, which leaves the other to a plan that may."""
    asked: list[bool] = []

    def measure(*_: object, with_quack: bool) -> dict[str, dict[str, float]]:
        asked.append(with_quack)
        return {"grouped_gemm": {"torch": 2.0} | ({"quack_128x192": 1.0} if with_quack else {})}

    monkeypatch.setattr(grouped_gemm_quack, "installed_version", lambda: "0.6.5")
    monkeypatch.setattr(kernel_tuning, "measure_experts", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    mesh, device = build_mesh(PLAN.folding, 0), torch.device("cuda", 0)
    graphed = PLAN.replace(cuda_graph=("full_iteration",))
    for plan, chosen in ((graphed, "torch"), (PLAN, "quack_128x192"), (graphed, "torch")):
        forget()
        assert set(tune(plan, mesh, device).values()) == {chosen}
    assert asked == [False, False, True, True]


def test_an_addition_to_bf16_has_no_choice_timed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = {name: {"torch": 2.0, "quack_128x192": 1.0} for name in ("grouped_gemm", "grouped_weight_grad")}
    monkeypatch.setattr(kernel_tuning, "measure_experts", lambda *_, **__: times_s)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    plan = PLAN.replace(grad_dtype="bf16")
    found = tune(plan, build_mesh(plan.folding, 0), torch.device("cuda", 0))
    assert {name.split()[0] for name in found} == {"grouped_gemm"}


def test_what_failed_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [{"torch": 2.0, "by_expert": math.inf}, {"torch": 2.0, "by_expert": 1.0}]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    for times_s, chosen in zip(seconds, ("torch", "by_expert"), strict=True):
        monkeypatch.setattr(
            kernel_tuning, "measure_experts", lambda *_, times_s=times_s, **__: {"grouped_gemm": times_s}
        )
        forget()
        assert set(tune(PLAN, build_mesh(PLAN.folding, 0), torch.device("cuda", 0)).values()) == {chosen}
    assert len(json.loads(cache_path().read_text())) == 2
