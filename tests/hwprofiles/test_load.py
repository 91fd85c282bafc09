import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.load import dump_profile, load_profile, profile_names
from moeplan.hwprofiles.schema import AttentionCurve, GemmCurve, HardwareProfile, Sourced

PRESETS = profile_names()


def _write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def _gemm(profile: HardwareProfile, dtype: str) -> GemmCurve:
    (curve,) = (curve for curve in profile.gemm if curve.dtype == dtype)
    return curve


def test_the_six_presets_are_there_and_named_as_their_files() -> None:
    assert {"h100", "h200", "b200", "b300", "gb200", "gb300"} <= set(PRESETS)
    assert [load_profile(name).name for name in PRESETS] == list(PRESETS)


@pytest.mark.parametrize("name", ["h100", "h200", "b200", "b300", "gb200", "gb300"])
def test_a_preset_covers_what_costs_ask_for(name: str) -> None:
    profile = load_profile(name)
    assert {"bf16", "fp8", "fp8_block"} <= set(profile.peak_flops_per_s)
    assert {"bf16", "fp8", "fp8_block"} <= {curve.dtype for curve in profile.gemm}
    assert {"bf16", "fp8_block"} <= {curve.dtype for curve in profile.grouped_gemm}
    shapes = {
        (curve.phase, curve.qk_head_dim, curve.v_head_dim) for curve in profile.attention if curve.dtype == "bf16"
    }
    assert {(phase, *dims) for phase in ("fwd", "bwd") for dims in ((192, 128), (128, 128), (64, 64))} <= shapes
    groups = {(curve.collective, curve.tier) for curve in profile.collectives}
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    assert groups == {(kind, tier) for kind in kinds for tier in ("scale_up", "network")}
    assert len(profile.dispatch) == 6


@pytest.mark.parametrize("name", PRESETS)
def test_measured_rates_stay_below_the_peak(name: str) -> None:
    profile = load_profile(name)
    curves: list[GemmCurve | AttentionCurve] = [*profile.gemm, *profile.grouped_gemm, *profile.attention]
    for curve in curves:
        assert max(curve.flops_per_s) < profile.peak_flops_per_s[curve.dtype].value


def test_spot_values() -> None:
    h100, h200, b200, gb200, gb300 = (load_profile(name) for name in ("h100", "h200", "b200", "gb200", "gb300"))
    assert gb300.memory_bytes.value == 298_013_687_808
    assert h100.memory_bytes.value == 85_520_809_984
    assert _gemm(h100, "bf16").curve.rate_at(4096) == pytest.approx(773e12, rel=1e-3)
    assert _gemm(gb300, "fp8_block").curve.rate_at(16384) == pytest.approx(3013e12, rel=1e-3)
    assert gb200.peak_flops_per_s["bf16"].value == 2500e12
    assert gb200.peak_flops_per_s["bf16"].low == 2450e12
    assert b200.hbm_bytes_per_s.value == 7.7e12
    assert b200.network_bytes_per_s_per_dir_per_gpu.value == 50e9
    assert gb300.network_bytes_per_s_per_dir_per_gpu.value == 100e9
    assert gb200.scale_up_domain_gpus.value == 72
    assert h200.num_sms is not None
    assert h200.num_sms.value == 132
    attention = {
        (curve.dtype, curve.phase, curve.qk_head_dim): curve.curve.rate_at(8192) / 1e12 for curve in gb300.attention
    }
    assert attention["bf16", "fwd", 192] == pytest.approx(1899)
    assert attention["mxfp8", "bwd", 192] == pytest.approx(1836)


def test_collectives_give_the_bus_bandwidth_that_was_read() -> None:
    collectives = {(c.collective, c.tier, c.num_ranks): c for c in load_profile("h100").collectives}
    size = 2**29
    all_reduce_s = collectives["all_reduce", "scale_up", 8].curve.time_at(size)
    assert 2 * 7 / 8 * size / all_reduce_s == pytest.approx(445e9, rel=2e-3)
    all_gather_s = collectives["all_gather", "scale_up", 8].curve.time_at(size)
    assert 7 / 8 * size / all_gather_s == pytest.approx(335e9, rel=2e-3)


def test_the_full_nvl72_all_reduce_reads_as_measured() -> None:
    (curve,) = (c for c in load_profile("gb200").collectives if c.num_ranks == 72)
    for size, bus_bytes_per_s in ((2**29, 586e9), (2**30, 681e9), (2**33, 835e9)):
        assert 2 * 71 / 72 * size / curve.curve.time_at(size) == pytest.approx(bus_bytes_per_s, rel=1e-3)


def test_the_fitted_dispatch_rates_of_the_report() -> None:
    rates: dict[tuple[str, str, str], Sourced] = {
        (name, rate.backend, rate.tier): rate.bytes_per_s_per_gpu
        for name in ("h100", "gb200")
        for rate in load_profile(name).dispatch
    }
    expected = {
        ("gb200", "alltoall", "scale_up"): 566e9,
        ("gb200", "hybridep", "scale_up"): 670e9,
        ("h100", "alltoall", "scale_up"): 324e9,
        ("h100", "hybridep", "scale_up"): 424e9,
        ("h100", "alltoall", "network"): 43.8e9,
        ("h100", "hybridep", "network"): 39.7e9,
    }
    assert {key: rates[key].value for key in expected} == expected
    assert {rates[key].source for key in expected} == {"fitted"}


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(InvalidInputError, match="unknown hardware 'gb301'") as caught:
        load_profile("gb301")
    assert "gb300" in caught.value.hint


@pytest.mark.parametrize(
    "number", ["3.35e12", "true", "{ value = 3.35e12 }", '{ value = 1.0, source = "guess", ref = "abc" }']
)
def test_a_number_without_a_source_is_refused(tmp_path: Path, number: str) -> None:
    path = _write(tmp_path / "mine.toml", f'base = "h100"\nhbm_bytes_per_s = {number}\n')
    with pytest.raises(InvalidInputError, match=r"hbm_bytes_per_s.*") as caught:
        load_profile(path)
    assert "\n" not in caught.value.message
    assert path in caught.value.message


def test_a_bare_number_is_told_how_to_be_written(tmp_path: Path) -> None:
    path = _write(tmp_path / "mine.toml", 'base = "h100"\nhbm_bytes_per_s = 3.35e12\n')
    with pytest.raises(InvalidInputError, match=r"hbm_bytes_per_s: a bare number has no source; write \{ value = "):
        load_profile(path)


@pytest.mark.parametrize("value", ["inf", "nan", "-1.0", "0.0"])
def test_a_rate_must_be_finite_and_above_zero(tmp_path: Path, value: str) -> None:
    number = f'{{ value = {value}, source = "measured", ref = "my cluster" }}'
    path = _write(tmp_path / "mine.toml", f'base = "h100"\nhbm_bytes_per_s = {number}\n')
    with pytest.raises(InvalidInputError, match="hbm_bytes_per_s"):
        load_profile(path)


def test_truncated_file_is_one_clear_error(tmp_path: Path) -> None:
    text = (Path(sys.modules["moeplan.hwprofiles.load"].__file__ or "").parent / "h100.toml").read_text()
    path = _write(tmp_path / "cut.toml", text[: len(text) // 2])
    with pytest.raises(InvalidInputError, match=r"cut.toml is not valid TOML"):
        load_profile(path)


def test_child_replaces_scalars_and_keeps_the_rest(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "mine.toml",
        'base = "h100"\n'
        'network_bytes_per_s_per_dir_per_gpu = { value = 25e9, source = "measured", ref = "my cluster" }\n'
        'peak_flops_per_s.bf16 = { value = 900e12, source = "measured", ref = "my cluster" }\n',
    )
    base, child = load_profile("h100"), load_profile(path)
    assert child.name == "mine"
    assert child.network_bytes_per_s_per_dir_per_gpu.value == 25e9
    assert child.peak_flops_per_s["bf16"].value == 900e12
    assert child.peak_flops_per_s["fp8"] == base.peak_flops_per_s["fp8"]
    # What was read over the network is scaled to the new NIC: test_links.py.
    changed = {"name", "network_bytes_per_s_per_dir_per_gpu", "peak_flops_per_s", "collectives", "dispatch"}
    assert child.model_dump(exclude=changed) == base.model_dump(exclude=changed)


def test_child_replaces_the_list_entry_of_the_same_identity(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "mine.toml",
        'base = "h100"\n'
        '[[gemm]]\ndtype = "bf16"\nrows = [128, 4096]\nflops_per_s = [2e14, 6e14]\n'
        'source = "measured"\nref = "my GPU"\n'
        '[[collectives]]\ncollective = "all_reduce"\ntier = "network"\nnum_ranks = 4\n'
        'message_bytes = [1024]\nseconds = [1e-5]\nsource = "measured"\nref = "my cluster"\n',
    )
    base, child = load_profile("h100"), load_profile(path)
    assert [curve.dtype for curve in child.gemm] == [curve.dtype for curve in base.gemm]
    assert _gemm(child, "bf16").ref == "my GPU"
    assert _gemm(child, "fp8") == _gemm(base, "fp8")
    assert child.collectives[:-1] == base.collectives
    assert child.collectives[-1].ref == "my cluster"


def test_a_base_may_be_a_path_seen_from_the_file(tmp_path: Path) -> None:
    number = '{ value = 2.5, source = "measured", ref = "invoice" }'
    _write(tmp_path / "parent.toml", f'base = "h200"\nprice_usd_per_gpu_hour = {number}\n')
    child = load_profile(_write(tmp_path / "child.toml", 'base = "./parent.toml"\ndescription = "ours"\n'))
    assert child.price_usd_per_gpu_hour is not None
    assert child.price_usd_per_gpu_hour.value == 2.5
    assert (child.name, child.description) == ("child", "ours")


@pytest.mark.parametrize(
    "text,problem",
    [
        ('base = "./mine.toml"\n', "leads back"),
        ("base = 3\n", "base: must be a preset name"),
        ('base = "h10"\n', "unknown hardware 'h10'"),
        ('base = "h100"\nhmb_bytes_per_s = 3\n', "hmb_bytes_per_s"),
        ('base = "h100"\ngemm = 3\n', "gemm"),
        ('base = "h100"\n' + 2 * '[[gemm]]\ndtype = "bf16"\n', "two entries with dtype = 'bf16'"),
        ('name = "bare"\n', "description: Field required"),
    ],
)
def test_broken_files_are_invalid_input(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        load_profile(_write(tmp_path / "mine.toml", text))


def test_missing_file_is_invalid_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="file not found"):
        load_profile(str(tmp_path / "none.toml"))


@pytest.mark.parametrize("name", PRESETS)
def test_dump_round_trips(tmp_path: Path, name: str) -> None:
    profile = load_profile(name)
    path = tmp_path / "copy.toml"
    dump_profile(profile, path)
    assert tomllib.loads(path.read_text())["name"] == name
    assert load_profile(str(path)) == profile


def test_loading_is_light() -> None:
    code = (
        "import sys; from moeplan.hwprofiles.load import load_profile; load_profile('h100'); "
        "print(sorted({'torch', 'numpy', 'scipy'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
