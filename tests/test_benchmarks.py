"""What the benchmarks compute apart from timing: work by group of kernels, tables, ratios."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moeplan.flops import training_flops_per_token
from moeplan.hwprofiles.load import load_profile
from moeplan.parameters import total_parameters
from moeplan.plan import Plan
from moeplan.presets import load_model

pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]


def _program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _plan(model: str) -> Plan:
    fields = {"model": load_model(model), "hardware": "h200", "num_gpus": 1, "seq_len": 4096, "global_batch_size": 32}
    return Plan.model_validate(fields | {"mbs": 4, "precision": "bf16"})


@pytest.mark.parametrize("name", ["h200-fine", "h200-deepseek", "h200-coarse"])
def test_groups_hold_the_flops_of_a_step(name: str) -> None:
    roofline, plan = _program("roofline"), _plan(name)
    ceilings = roofline.ceilings_of(load_profile(str(ROOT / "results" / "2026-11-29-h200-profile.toml")), plan)
    groups = roofline.groups_of(plan, ceilings, total_parameters(plan.model))
    flops = {group.name: group.flops for group in groups}
    # Attention's backward multiplies the scores out once more, and the router is not counted in a model's FLOPs.
    product = flops["attention: forward"] / 2
    expected = training_flops_per_token(plan.model, plan.seq_len) * plan.tokens_per_step
    assert sum(flops.values()) - product - flops["router"] == pytest.approx(expected, rel=1e-6)
    assert all(group.roofline_s(ceilings) > 0 for group in groups)


@pytest.mark.parametrize(
    "changes, bytes_per_parameter",
    [({}, 30), ({"main_weight_remainders": True}, 28), ({"moment_dtype": "bf16"}, 22), ({"precision": "fp32"}, 28)],
)
def test_adam_moves_what_the_plan_keeps(changes: dict[str, Any], bytes_per_parameter: int) -> None:
    roofline, plan = _program("roofline"), _plan("h200-fine")
    ceilings = roofline.ceilings_of(load_profile(str(ROOT / "results" / "2026-11-29-h200-profile.toml")), plan)
    (adam,) = (one for one in roofline.groups_of(plan.replace(**changes), ceilings, 1000) if one.name == "Adam")
    assert adam.bytes == bytes_per_parameter * 1000


def test_products_whose_kernels_have_one_name_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    roofline, plan = _program("roofline"), _plan("h200-fine")
    ceilings = roofline.ceilings_of(load_profile(str(ROOT / "results" / "2026-11-29-h200-profile.toml")), plan)
    apart = [one for one in roofline.groups_of(plan, ceilings, 1) if one.family == "expert_gemm"]
    monkeypatch.setattr(roofline, "choices", lambda: {"grouped_weight_grad 2x3x4": "quack_128x192"})
    (together,) = (one for one in roofline.groups_of(plan, ceilings, 1) if one.family == "expert_gemm")
    assert together.flops == sum(one.flops for one in apart)
    assert together.bytes == sum(one.bytes for one in apart)


def test_each_kernel_is_counted_once() -> None:
    roofline, plan = _program("roofline"), _plan("h200-fine")
    ceilings = roofline.ceilings_of(load_profile(str(ROOT / "results" / "2026-11-29-h200-profile.toml")), plan)
    kernels = {
        ("expert_gemm", "_add_products"): (0.3, 96),
        ("expert_gemm", "cutlass"): (0.2, 192),
        ("elementwise", "_norm_backward"): (0.1, 104),
        ("host", "copy"): (0.05, 2),
    }
    rows = roofline.table(roofline.groups_of(plan, ceilings, 1), kernels, ceilings)
    times_s = {row["kernels"]: row["time_s"] for row in rows}
    assert times_s["experts: weight gradient, added to fp32"] == 0.3
    assert times_s["experts: forward and input gradient"] == 0.2
    assert times_s["norms and sums before them"] == 0.1
    assert times_s["others"] == 0.05
    assert sum(times_s.values()) == pytest.approx(0.65)


def test_kernels_of_fp8_have_groups_and_a_ceiling_of_their_own() -> None:
    roofline, plan = _program("roofline"), _plan("h200-fine")
    profile = load_profile(str(ROOT / "results" / "2026-11-29-h200-profile.toml"))
    wide = roofline.groups_of(plan, roofline.ceilings_of(profile, plan), 1)
    plan = plan.replace(precision="fp8_current")
    ceilings = roofline.ceilings_of(profile, plan)
    low = roofline.groups_of(plan, ceilings, 1)
    assert {one.name for one in low} - {one.name for one in wide} == {"dense operands quantized", "weights quantized"}
    kernels = {
        ("expert_gemm", "_gradient"): (1.0, 1),
        ("expert_gemm", "_rows"): (2.0, 1),
        ("permute", "_quantize_rows"): (3.0, 1),
        ("elementwise", "_quantize_rows"): (4.0, 1),
        ("optimizer", "_quantize_weights"): (5.0, 1),
    }
    assert {row["kernels"]: row["time_s"] for row in roofline.table(low, kernels, ceilings) if row["time_s"]} == {
        "experts: weight gradient, added to fp32": 1.0,
        "experts: forward and input gradient": 2.0,
        "rows copied": 3.0,
        "dense operands quantized": 4.0,
        "weights quantized": 5.0,
    }
    rates = [{one.name: one.flops_per_s for one in groups} for groups in (low, wide)]
    assert rates[0]["dense layers"] > 2 * rates[1]["dense layers"]
    assert rates[0]["head"] == rates[1]["head"]


def test_the_ratio_is_to_the_fastest_of_the_other_engine() -> None:
    versus = _program("vs_megatron")

    def row(engine: str, settings: list[str], tokens_per_s: float) -> dict[str, object]:
        figures = {"step_s": 1 / tokens_per_s, "tokens_per_s_per_gpu": tokens_per_s, "model_tflops_per_gpu": 1.0}
        return {"engine": engine, "model": "m", "settings": settings, "peak_allocated_bytes": 2**30, **figures}

    rows = [row("moeplan", ["bf16"], 150.0), row("megatron-core", ["a"], 80.0), row("megatron-core", ["b"], 100.0)]
    rows.append({"engine": "megatron-core", "model": "m", "settings": ["c"], "error": "no memory"})
    lines = versus.markdown(rows).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == ["1.500x", "0.800x", "1.000x", ""]
    assert "1.0 GiB" in lines[0]
    assert "failed" in lines[3]


def test_every_back_end_runs_at_the_shapes_of_a_model() -> None:
    import torch

    from benchmarks.kernel_cases import cases
    from benchmarks.kernels import markdown, rows_of
    from benchmarks.roofline import Ceilings
    from moeplan.kernels import activation, grouped_weight_grad, split_qkv
    from tests.executor.cases import GQA_MODEL, tiny_plan

    plan = tiny_plan(GQA_MODEL, 1, precision="bf16", mbs=2)
    ceilings = Ceilings(1e12, 1e12, (1e12, 1e12), 1e12)

    def timed(run: Callable[[], object], num_calls: int) -> float:
        """A second for the first back end and a half for others; calls nothing, as one call was made before."""
        return 1.0 if run is first else 0.5

    rows = []
    for case in cases(plan, torch.device("cpu")):
        first = next(iter(case.runs.values()))
        rows += rows_of("tiny", case, ceilings, timed)
    seen = {operation: {row.backend for row in rows if row.operation == operation} for operation in
            {row.operation for row in rows}}  # fmt: skip
    assert seen["activation"] == set(activation.BACKENDS) - {"reference"}
    assert seen["rotation of queries and keys"] == set(split_qkv.BACKENDS) - {"reference"}
    # Kernels of Hopper alone, and what only few large experts are tried with.
    assert seen["experts: weight gradients of a pair"] == {"torch"} < set(grouped_weight_grad.BACKENDS)
    assert all(row.is_fastest == (row.time_s == 0.5 or len(seen[row.operation]) == 1) for row in rows)
    forward = next(row for row in rows if row.operation.startswith("experts: forward"))
    assert forward.tflop * 1e12 == pytest.approx(2 * 2 * 32 * 2 * 32 * 32)
    assert "| tiny | activation |" in markdown(rows)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="compiled for the GPU, where the program itself runs")
def test_each_way_of_summing_fp8_runs() -> None:
    import torch

    from moeplan.executor import candidate_timing
    from tests.kernels.fp8_interpreter import exact_fp8

    program = _program("fp8_sums")

    def once(run: Callable[[], object], _: int) -> float:
        run()
        return candidate_timing.WARM_UP_S

    with exact_fp8():
        rows = list(program.measured((2, 128, 128, 128), torch.device("cpu"), once))
    assert {(row["operation"], row["way"]) for row in rows} == {
        (operation, way) for operation in ("rows", "weight gradient", program.PAIR) for way in program.WAYS
    }
    for row in rows:
        assert row["tflops"] == pytest.approx((2 if row["operation"] == program.PAIR else 1) * 2 * 128**3 / 1e12)
