"""Calibration of a GPU: the profile from given readings, and the real thing where there is a GPU."""

from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InvalidInputError
from moeplan.executor import microbench, microbench_cuda
from moeplan.executor.microbench_cuda_experts import EXPERT_SHAPES
from moeplan.executor.microbench_cuda_profile import base_profile, profile_from_cuda_readings
from moeplan.executor.microbench_window import Reading
from moeplan.hwprofiles.load import dump_profile, load_profile
from moeplan.hwprofiles.schema import GroupedGemmPhase

ANSWER: dict[str, Any] = {
    "device": "NVIDIA H200",
    "memory_bytes": 150e9,
    "num_sms": 132,
    "overheads_bytes": [0.8e9],
    "power": {"mean_power": "690 W over 6 readings"},
    "packages": "quack-kernels 0.6.5",
}

RATES: dict[GroupedGemmPhase, float] = {"fwd": 6e14, "dgrad": 5e14, "wgrad": 3e14, "wgrad_of_two": 4e14}


def readings() -> list[Reading]:
    return [
        Reading("gemm", 1024, (6e14, 7e14)),
        Reading("gemm", 4096, (7e14,)),
        Reading("gemm_inner", 100, (150.0,)),
        Reading("gemm_inner", 300, (350.0,)),
        Reading("peak.bf16", 8192, (8e14,)),
        *(
            Reading(f"grouped_gemm.{backend}.{phase}.{E}", rows, (rate,))
            for backend in ("torch", "quack")
            for E, *_ in EXPERT_SHAPES
            for phase, rate in RATES.items()
            for rows in (64, 4096)
        ),
        Reading("attention.fwd.192.128", 4096, (5e14,)),
        Reading("attention.bwd.192.128", 4096, (4e14,)),
        Reading("memory.copy", 2**30, (4.3e12,)),
        Reading("memory.elementwise", 2**28, (3.6e12, 4.08e12)),
        Reading("memory.adam", 2**30, (3.5e12,)),
        Reading("memory.permute", 2**29, (1.2e12,)),
        Reading("memory.unpermute", 2**29, (2.4e12,)),
        Reading("launch", 1, (5e-6,)),
        Reading("floor", 1, (2e-6,)),
        Reading("host_link.to_device", 2**30, (5.5e10,)),
        Reading("host_link.to_host", 2**30, (5e10,)),
        Reading("all_reduce.2", 2**20, (1e-4,)),
    ]


def test_measured_figures_replace_those_of_the_preset_and_the_rest_stays(tmp_path: Path) -> None:
    base = load_profile("h200")
    profile = profile_from_cuda_readings(readings(), ANSWER, 2)
    assert profile.name == "h200"
    (curve,) = (curve for curve in profile.gemm if curve.dtype == "bf16")
    assert (curve.rows, curve.flops_per_s, curve.inner_overhead) == ((1024, 4096), (6.5e14, 7e14), 50)
    assert "quack-kernels 0.6.5, 690 W" in curve.ref
    assert profile.sustained_frac.value == 1
    expected = {(shape[0], phase): (rate, rate) for shape in EXPERT_SHAPES for phase, rate in RATES.items()}
    for backend in ("torch", "quack"):
        curves = [one for one in profile.grouped_gemm if (one.backend, one.dtype) == (backend, "bf16")]
        assert {(curve.num_experts, curve.phase): curve.flops_per_s for curve in curves} == expected
    (latent,) = (one for one in profile.attention if (one.dtype, one.phase, one.qk_head_dim) == ("bf16", "fwd", 192))
    assert latent.flops_per_s == (5e14,)
    assert len(profile.attention) == len(base.attention)
    assert profile.hbm_efficiency_frac.value == pytest.approx(0.8)
    assert profile.gather_efficiency_frac.value == pytest.approx(1.6 / 4.8, rel=1e-3)
    assert profile.host_link_bytes_per_s_per_dir_per_gpu.value == 5e10
    assert profile.framework_overhead_bytes.value == 0.8e9
    pair = {
        one.tier: one.seconds for one in profile.collectives if (one.collective, one.num_ranks) == ("all_reduce", 2)
    }
    assert pair["scale_up"] == (1e-4,)
    assert profile.network_bytes_per_s_per_dir_per_gpu == base.network_bytes_per_s_per_dir_per_gpu
    assert profile.price_usd_per_gpu_hour == base.price_usd_per_gpu_hour
    assert {curve.dtype for curve in profile.gemm} == {curve.dtype for curve in base.gemm}
    dump_profile(profile, tmp_path / "h200.toml")
    assert load_profile(str(tmp_path / "h200.toml")) == profile


@pytest.mark.parametrize(
    "device_name,preset", [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GB300", "gb300"), ("NVIDIA B200", "b200")]
)
def test_the_driver_name_finds_the_preset(device_name: str, preset: str) -> None:
    assert base_profile(device_name).name == preset


def test_a_gpu_without_preset_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidInputError, match="no preset for 'Tesla T4'") as caught:
        base_profile("Tesla T4")
    assert "base = " in caught.value.hint


@pytest.mark.parametrize("failing, left", [({"flash_attn_4"}, ["sdpa"]), ({"sdpa", "flash_attn_4"}, [])])
def test_attention_that_does_not_run_leaves_the_other_back_end(
    failing: set[str], left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*arguments: object) -> object:
        if arguments[-1] in failing:
            raise ImportError(f"no {arguments[-1]}")
        return arguments[-1]

    monkeypatch.setattr(microbench_cuda, "_normal", lambda *_: None)
    monkeypatch.setattr(microbench_cuda, "attention_candidates", lambda *_: ["sdpa", "flash_attn_4"])
    monkeypatch.setattr(microbench_cuda, "_AttentionStep", step)
    with pytest.warns(RuntimeWarning, match="no flash_attn_4"):
        found: list[Any] = list(microbench_cuda._attention_steps(4096, 128, 128))
    assert found == left


@pytest.mark.gpu
@pytest.mark.slow
def test_this_gpu() -> None:
    parts: list[str] = []
    profile = microbench.calibrate(1, progress=parts.append)
    assert len(parts) == 6
    assert profile.device == "cuda"
    (curve,) = (curve for curve in profile.gemm if curve.dtype == "bf16")
    peak = profile.peak_flops_per_s["bf16"].value
    assert 0.3 * peak < max(curve.flops_per_s) < peak
    assert 0.3 < profile.hbm_efficiency_frac.value <= 1
    assert profile.kernel_floor_s.value < profile.launch_s.value < 1e-4
    best = {
        curve.phase: max(curve.flops_per_s)
        for curve in profile.grouped_gemm
        if (curve.dtype, curve.backend, curve.num_experts) == ("bf16", "torch", 8)
    }
    assert 0.3 * peak < best["wgrad"] <= 1.1 * best["wgrad_of_two"] < 1.1 * peak
    assert 0.3 * peak < best["dgrad"] < 1.2 * best["fwd"] < 1.2 * peak
