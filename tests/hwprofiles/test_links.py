"""A user's own NIC reaches everything that was read over the base's."""

from pathlib import Path

import pytest

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import HardwareProfile

H100 = load_profile("h100")
HALF = H100.network_bytes_per_s_per_dir_per_gpu.value / 2


def _mine(folder: Path, text: str) -> HardwareProfile:
    path = folder / "mine.toml"
    path.write_text('base = "h100"\n' + text)
    return load_profile(str(path))


def _nic(value: float) -> str:
    return f'network_bytes_per_s_per_dir_per_gpu = {{ value = {value}, source = "datasheet", ref = "our NIC" }}\n'


def test_half_the_nic_takes_twice_the_time_beyond_latency(tmp_path: Path) -> None:
    mine = _mine(tmp_path, _nic(HALF))
    for own, base in zip(mine.collectives, H100.collectives, strict=True):
        if own.tier == "scale_up":
            assert own == base
            continue
        latency_s = min(base.seconds)
        assert own.seconds[-1] - latency_s == pytest.approx(2 * (base.seconds[-1] - latency_s))
        assert own.source == "assumed"
        assert own.error_bar_frac >= 0.3
    for rate, base_rate in zip(mine.dispatch, H100.dispatch, strict=True):
        factor = 0.5 if rate.tier == "network" else 1
        assert rate.bytes_per_s_per_gpu.value == pytest.approx(factor * base_rate.bytes_per_s_per_gpu.value)


def test_oversubscription_is_a_slower_link(tmp_path: Path) -> None:
    shared = 'network_oversubscription = { value = 2, source = "datasheet", ref = "leaf to spine 1:2" }\n'
    assert _mine(tmp_path, shared).dispatch == _mine(tmp_path, _nic(HALF)).dispatch
    twice = _mine(tmp_path, _nic(4 * HALF) + shared)
    assert [one.seconds for one in twice.collectives] == [one.seconds for one in H100.collectives]


def test_readings_of_ones_own_stay_as_they_are(tmp_path: Path) -> None:
    reading = (
        '[[collectives]]\ncollective = "all_to_all"\ntier = "network"\nnum_ranks = 8\n'
        'message_bytes = [1e6, 1e9]\nseconds = [1e-4, 5e-2]\nsource = "measured"\nref = "our cluster"\n'
    )
    mine = _mine(tmp_path, _nic(HALF) + reading)
    own = next(
        one for one in mine.collectives if (one.collective, one.tier, one.num_ranks) == ("all_to_all", "network", 8)
    )
    assert own.seconds == (1e-4, 5e-2)
    assert own.source == "measured"


def test_an_unchanged_link_scales_nothing(tmp_path: Path) -> None:
    mine = _mine(tmp_path, _nic(2 * HALF))
    assert mine.collectives == H100.collectives


@pytest.mark.parametrize(
    "entry, named",
    [
        ('[[dispatch]]\nbackend = "torch"\ntier = "network"\n', r"dispatch\.\d+\.bytes_per_s_per_gpu"),
        ('[[collectives]]\ncollective = "all_reduce"\ntier = "network"\nnum_ranks = 3\n', r"collectives\.\d+\."),
        (
            '[[collectives]]\ncollective = "all_reduce"\ntier = "network"\nnum_ranks = 3\nseconds = ["a"]\n',
            r"collectives\.\d+\.",
        ),
    ],
)
def test_a_malformed_base_is_refused_by_key(tmp_path: Path, entry: str, named: str) -> None:
    (tmp_path / "base.toml").write_text(f'base = "h100"\n{entry}')
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "./base.toml"\n{_nic(HALF)}')
    with pytest.raises(InvalidInputError, match=named):
        load_profile(str(path))


@pytest.mark.parametrize("domain", [0.5, 2.5])
def test_a_scale_up_domain_has_whole_gpus(tmp_path: Path, domain: float) -> None:
    with pytest.raises(InvalidInputError, match=r"scale_up_domain_gpus: value must be a whole number of at least 1"):
        _mine(tmp_path, f'scale_up_domain_gpus = {{ value = {domain}, source = "assumed", ref = "rule: ours" }}\n')
