import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import InvalidInputError, RunFailedError
from moeplan.executor import microbench
from moeplan.executor.microbench_compute import DTYPES
from moeplan.executor.microbench_profile import fitted_inner_overhead, profile_from_readings
from moeplan.executor.microbench_window import Reading
from moeplan.hwprofiles.entries import assumed_entries
from moeplan.hwprofiles.load import dump_profile, load_profile

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def _compute_readings() -> list[Reading]:
    return [
        Reading("gemm", 16, (1e9, 3e9, 2e9)),
        Reading("gemm", 1024, (8e9,)),
        Reading("gemm_inner", 100, (150.0,)),
        Reading("gemm_inner", 300, (350.0,)),
        *(Reading(f"peak.{dtype}", 512, (4e9, 5e9, 6e9)) for dtype in DTYPES),
        Reading("grouped_gemm.8", 4, (2e9,)),
        Reading("attention.fwd.64", 256, (3e9,)),
        Reading("attention.bwd.64", 256, (2e9,)),
        Reading("memory.copy", 2**24, (10e9,)),
        Reading("memory.elementwise", 2**20, (6e9, 8e9)),
        Reading("memory.adam", 2**22, (7e9,)),
        Reading("memory.gather", 2**20, (5e9,)),
        Reading("launch", 1, (4e-6,)),
        Reading("first_step", 0, (30e6, 32e6, 31e6)),
        Reading("allocator_reserve", 44e6, (0.7, 0.8, 0.9)),
        Reading("floor", 1, (1e-6,)),
    ]


def _collective_readings() -> list[Reading]:
    return [
        Reading(f"{name}.{num_ranks}", size, (seconds,))
        for name in COLLECTIVES
        for num_ranks in (2, 4)
        for size, seconds in ((4096, 1e-3), (8_000_000, 9e-3))
    ]


def test_every_figure_of_the_profile_is_the_median_of_its_readings() -> None:
    readings = _compute_readings() + _collective_readings()
    profile = profile_from_readings(readings, [200e6, 220e6, 210e6, 230e6], 4)
    assert (profile.name, profile.device) == ("cpu-host", "cpu")
    assert profile.scale_up_domain_gpus.value == 4
    assert list(profile.gemm[0].rows) == [16, 1024]
    assert profile.gemm[0].flops_per_s == (2e9, 8e9)
    assert profile.gemm[0].inner_overhead == 50
    assert profile.peak_flops_per_s["fp32"].value == 8e9  # the GEMM table has a better reading
    assert profile.peak_flops_per_s["bf16"].value == 5e9
    assert [(curve.num_experts, curve.flops_per_s) for curve in profile.grouped_gemm] == [(8, (2e9,))]
    assert [(curve.phase, curve.qk_head_dim) for curve in profile.attention] == [("fwd", 64), ("bwd", 64)]
    assert profile.framework_overhead_bytes.value == 246e6  # the median process, and what a first step loads
    assert profile.allocator_reserve_frac is not None
    assert profile.allocator_reserve_frac.value == 0.8
    assert profile.hbm_bytes_per_s.value == 10e9
    assert profile.hbm_efficiency_frac.value == 0.7
    assert profile.gather_efficiency_frac.value == 0.5
    assert (profile.launch_s.value, profile.kernel_floor_s.value) == (4e-6, 1e-6)
    assert profile.scale_up_bytes_per_s_per_dir_per_gpu.value == float(f"{8e6 / 9e-3:.4g}")
    assert len(profile.collectives) == 10


def test_the_exchange_of_tokens_is_latency_and_what_leaves_the_rank() -> None:
    profile = profile_from_readings(_compute_readings() + _collective_readings(), [1e8], 4)
    (rate,) = profile.dispatch
    assert rate.latency_s.value == 1e-3
    assert rate.bytes_per_s_per_gpu.value == pytest.approx(8e6 * 3 / 4 / 8e-3)


def test_a_single_process_has_no_collectives_and_says_what_it_assumes() -> None:
    profile = profile_from_readings(_compute_readings(), [1e8], 1)
    assert not profile.collectives
    assert not profile.dispatch
    assumed = dict(assumed_entries(profile))
    assert set(assumed) == {
        "scale_up_bytes_per_s_per_dir_per_gpu",
        "network_bytes_per_s_per_dir_per_gpu",
        "host_link_bytes_per_s_per_dir_per_gpu",
    }
    assert "1 processes" in profile.launch_s.ref
    assert torch.__version__ in profile.launch_s.ref


@given(st.floats(0, 1e3), st.floats(1e-9, 1e3), st.lists(st.integers(1, 10**4), min_size=2, unique=True))
def test_the_inner_overhead_of_exact_times_is_found(overhead: float, slope: float, inners: list[int]) -> None:
    times_s: dict[float, float] = {inner: slope * (inner + overhead) for inner in inners}
    assert fitted_inner_overhead(times_s) == pytest.approx(overhead, rel=1e-4, abs=1e-2)


def test_the_inner_overhead_is_never_negative() -> None:
    assert fitted_inner_overhead({100: 1.0, 200: 4.0}) == 0
    assert fitted_inner_overhead({100: 2.0, 200: 1.0}) == 0


@pytest.mark.parametrize("num_processes", [0, -1, 65])
def test_a_number_of_processes_out_of_range_is_refused(num_processes: int) -> None:
    with pytest.raises(InvalidInputError, match=f"processes: got {num_processes}, allowed: 1 to 64"):
        microbench.calibrate(num_processes, device="cpu")


def test_other_devices_are_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidInputError, match="device: got 'tpu', allowed: auto, cpu, cuda"):
        microbench.calibrate(1, device="tpu")


def test_more_processes_than_gpus_are_refused() -> None:
    num_gpus = torch.cuda.device_count()
    with pytest.raises(InvalidInputError, match=f"{num_gpus + 1} processes on {num_gpus} GPUs") as caught:
        microbench.calibrate(num_gpus + 1, device="cuda")
    assert "--device cpu" in caught.value.hint


def test_a_process_that_fails_is_named_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(microbench.WORKERS, "cpu", "moeplan.executor.no_such_module")
    with pytest.raises(RunFailedError, match=r"rank 0: .*No module named moeplan\.executor\.no_such_module"):
        microbench.calibrate(2, device="cpu")


@pytest.mark.slow
def test_this_machine_with_three_processes(tmp_path: Path) -> None:
    parts: list[str] = []
    profile = microbench.calibrate(3, device="cpu", progress=parts.append)
    assert parts[0] == "allocator, 3 processes"
    assert len(parts) == 7
    assert {(curve.collective, curve.num_ranks) for curve in profile.collectives} == {
        (name, num_ranks) for name in COLLECTIVES for num_ranks in (2, 3)
    }
    assert all(len(curve.flops_per_s) == 6 for curve in profile.gemm)
    assert profile.kernel_floor_s.value <= profile.launch_s.value
    # Python with torch takes 100 MB at least, and three of them fit.
    assert 1e8 < profile.framework_overhead_bytes.value < profile.memory_bytes.value
    large = max(statistics.median(curve.flops_per_s) for curve in profile.grouped_gemm)
    assert large < 1.5 * profile.peak_flops_per_s["fp32"].value
    dump_profile(profile, tmp_path / "cpu-host.toml")
    assert load_profile(str(tmp_path / "cpu-host.toml")) == profile
