import pytest

from moeplan.hwprofiles.entries import all_entries, assumed_entries
from moeplan.hwprofiles.load import load_profile, profile_names


@pytest.mark.parametrize("name", profile_names())
def test_every_figure_is_listed_once_with_a_source(name: str) -> None:
    profile = load_profile(name)
    entries = all_entries(profile)
    key_paths = [entry.key_path for entry in entries]
    assert len(set(key_paths)) == len(key_paths)
    assert all(entry.ref and entry.unit and 0 <= entry.error_bar_frac <= 1 for entry in entries)
    tables = len(profile.gemm) + len(profile.grouped_gemm) + len(profile.attention) + len(profile.collectives)
    assert sum(entry.value is None for entry in entries) == tables


@pytest.mark.parametrize("name", profile_names())
def test_what_is_assumed_states_a_rule(name: str) -> None:
    profile = load_profile(name)
    assumed = assumed_entries(profile)
    assert [key_path for key_path, _ in assumed] == [e.key_path for e in all_entries(profile) if e.source == "assumed"]
    assert all(record.ref.startswith("rule: ") and record.error_bar_frac >= 0.08 for _, record in assumed)


def test_units_follow_the_names() -> None:
    units = {entry.key_path: entry.unit for entry in all_entries(load_profile("h100"))}
    assert units["hbm_bytes_per_s"] == "B/s"
    assert units["memory_bytes"] == units["host_memory_bytes_per_gpu"] == "B"
    assert units["peak_flops_per_s.bf16"] == units["gemm[bf16]"] == "FLOP/s"
    assert units["dispatch[deepep network].latency_s"] == units["launch_s"] == "s"
    assert units["dispatch[deepep network].bytes_per_s_per_gpu"] == "B/s"
    assert units["sustained_frac"] == "fraction"
    assert units["price_usd_per_gpu_hour"] == "USD/GPU-hour"
    assert units["mtbf_gpu_hours"] == "GPU-hours"
    assert units["scale_up_domain_gpus"] == "GPUs"
    assert units["collectives[all_reduce scale_up x8]"] == "s"


def test_summaries_say_ranges() -> None:
    entries = {entry.key_path: entry for entry in all_entries(load_profile("h100"))}
    assert entries["price_usd_per_gpu_hour"].summary == "2.95 (1.99 to 6.88)"
    assert entries["gemm[bf16]"].summary == "10 points, rows 16 to 16384: 3.71e+13 to 7.91e+14"


def test_curves_of_one_pass_are_told_apart() -> None:
    profile = load_profile("h200")
    curve = profile.grouped_gemm[0]
    both = tuple(curve.model_copy(update={"phase": phase}) for phase in (None, "wgrad"))
    entries = all_entries(profile.model_copy(update={"grouped_gemm": both}))
    labels = [entry.key_path for entry in entries if entry.key_path.startswith("grouped_gemm")]
    assert labels[1] == labels[0].replace(curve.backend, f"{curve.backend} wgrad")
