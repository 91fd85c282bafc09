"""GEMM rates: monotone in every side, stand-ins for missing formats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.load import load_profile
from moeplan.simulator.gemm_rates import TYPICAL_INNER, dense_rate

H100 = load_profile("h100")
SIDES = st.floats(1, 1e5)


@given(rows=SIDES, cols=SIDES, inner=SIDES, side=st.integers(0, 2), growth=st.floats(1, 10))
def test_time_never_falls_with_any_side(rows: float, cols: float, inner: float, side: int, growth: float) -> None:
    rate = dense_rate(H100, "bf16")
    sides = [rows, cols, inner]
    before = rate.seconds(*sides)
    sides[side] *= growth
    assert rate.seconds(*sides) >= before * (1 - 1e-12)


def test_typical_shape_runs_at_the_sustained_rate_of_the_curve() -> None:
    curve = next(curve for curve in H100.gemm if curve.dtype == "bf16")
    seconds = dense_rate(H100, "bf16").seconds(4096, 8192, TYPICAL_INNER)
    reached = 2 * 4096 * 8192 * TYPICAL_INNER / seconds
    assert reached == pytest.approx(curve.curve.rate_at(4096) * H100.sustained_frac.value)


def test_short_inner_dimension_is_slower_as_deepgemm_read() -> None:
    rate = dense_rate(H100, "bf16")

    def flops_per_s(inner: float) -> float:
        return 2 * 4096 * 7168 * inner / rate.seconds(4096, 7168, inner)

    # DeepGEMM on H800: 1520 TFLOP/s at K 16384, 1410 at 7168, 1212 at 1536, 775 at 512.
    assert flops_per_s(7168) / flops_per_s(16384) == pytest.approx(1410 / 1520, abs=0.06)
    assert flops_per_s(1536) / flops_per_s(16384) == pytest.approx(1212 / 1520, abs=0.06)
    assert flops_per_s(512) / flops_per_s(16384) == pytest.approx(775 / 1520, abs=0.08)


def test_missing_format_borrows_the_nearest_curve_by_peaks() -> None:
    bare = H100.model_copy(update={"gemm": tuple(curve for curve in H100.gemm if curve.dtype == "bf16")})
    rate = dense_rate(bare, "fp8")
    ratio = bare.peak_flops_per_s["fp8"].value / bare.peak_flops_per_s["bf16"].value
    assert rate.source == "assumed"
    assert rate.note.startswith("gemm[fp8]: the bf16 curve")
    assert rate.seconds(4096, 4096, 4096) == pytest.approx(dense_rate(bare, "bf16").seconds(4096, 4096, 4096) / ratio)


def test_profile_without_curves_runs_at_a_part_of_its_peak() -> None:
    bare = H100.model_copy(update={"gemm": ()})
    rate = dense_rate(bare, "bf16")
    assert "0.7 of the bf16 peak" in rate.note
    assert rate.seconds(1e4, 1e4, TYPICAL_INNER) == pytest.approx(
        2e8 * TYPICAL_INNER / (0.7 * H100.peak_flops_per_s["bf16"].value)
    )


def test_unknown_format_says_what_the_profile_has() -> None:
    with pytest.raises(InvalidInputError, match=r"no GEMM rate for int3, allowed: .*bf16"):
        dense_rate(H100, "int3")


def test_a_curve_may_state_what_its_inner_dimension_pays() -> None:
    """A host has no pipeline to fill: without overhead, time goes with K alone."""
    curve = H100.gemm[0].model_copy(update={"typical_inner": 512.0, "inner_overhead": 0.0})
    rate = dense_rate(H100.model_copy(update={"gemm": (curve,)}), curve.dtype)
    assert rate.seconds(512, 512, 1024) == pytest.approx(2 * rate.seconds(512, 512, 512))
