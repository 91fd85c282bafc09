import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.hwprofiles.curves import MonotoneTime
from moeplan.hwprofiles.load import load_profile, profile_names

_SIZES = st.floats(min_value=1.0, max_value=1e12)
_POINTS = st.lists(st.tuples(_SIZES, st.floats(min_value=1e-9, max_value=1e16)), min_size=1, max_size=12)
PRESETS = {name: load_profile(name) for name in profile_names()}
CURVES = [
    (f"{name} {field} {index}", entry.curve)
    for name, profile in PRESETS.items()
    for field in ("gemm", "grouped_gemm", "attention", "collectives")
    for index, entry in enumerate(getattr(profile, field))
]


@given(points=_POINTS, first=_SIZES, second=_SIZES)
def test_more_work_never_takes_less_time(points: list[tuple[float, float]], first: float, second: float) -> None:
    distinct = dict(points)
    curve = MonotoneTime.from_rates(list(distinct), list(distinct.values()))
    smaller, larger = sorted((first, second))
    # The power of interpolation rounds to a few units of the last place.
    assert curve.time_at(smaller) <= curve.time_at(larger) * (1 + 1e-12)


@given(curve=st.sampled_from(CURVES), first=_SIZES, second=_SIZES)
def test_curves_of_presets_are_monotone(curve: tuple[str, MonotoneTime], first: float, second: float) -> None:
    smaller, larger = sorted((first, second))
    assert curve[1].time_at(smaller) <= curve[1].time_at(larger) * (1 + 1e-12), curve[0]


@given(points=_POINTS)
def test_no_reading_is_made_faster(points: list[tuple[float, float]]) -> None:
    distinct = dict(points)
    curve = MonotoneTime.from_times(list(distinct), list(distinct.values()))
    for size, seconds in distinct.items():
        assert curve.time_at(size) >= seconds * (1 - 1e-12)


def test_ends_and_middle() -> None:
    curve = MonotoneTime.from_rates([10, 1000], [1, 10])
    assert curve.time_at(1) == curve.time_at(10) == 10
    assert curve.time_at(100) == pytest.approx((10 * 100) ** 0.5)
    assert curve.time_at(2000) == 200
    assert curve.rate_at(2000) == 10


def test_a_dip_is_lifted_to_the_time_before_it() -> None:
    assert MonotoneTime.from_times([4, 1, 2], [3, 2, 1]).times == (2, 2, 3)
