"""Grouped GEMMs: curves of a back end and of a pass, additions to main gradients, the dense rate instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import GroupedGemmCurve, GroupedGemmPhase, HardwareProfile
from moeplan.simulator.gemm_rates import dense_rate
from moeplan.simulator.grouped_gemm_rates import added_weight_grad_seconds, grouped_seconds

H100 = load_profile("h100")
SIZES = (1024.0, 4096.0, 7168.0)


def test_grouped_gemm_without_its_own_curve_is_a_dense_one_of_all_rows() -> None:
    seconds, rate = grouped_seconds(H100, "bf16", "no such back end", (1024, 4096, 7168), 8, rate_frac=0.8)
    assert seconds == pytest.approx(dense_rate(H100, "bf16").seconds(8192, 4096, 7168) / 0.8)
    assert rate.source == "assumed"


def test_small_groups_pay_for_whole_tiles() -> None:
    few, _ = grouped_seconds(H100, "bf16", "no such back end", (8, 4096, 7168), 8)
    full, _ = grouped_seconds(H100, "bf16", "no such back end", (64, 4096, 7168), 8)
    assert few == full


def test_grouped_gemm_uses_the_curve_of_its_back_end() -> None:
    h200 = load_profile("h200")
    curve = next(curve for curve in h200.grouped_gemm if curve.dtype == "bf16" and curve.num_experts)
    assert curve.num_experts is not None
    seconds, rate = grouped_seconds(h200, "bf16", curve.backend, (1024, 4096, 7168), curve.num_experts)
    assert rate.source == curve.source
    assert seconds > 0


def curve(phase: GroupedGemmPhase | None, *flops_per_s: float, num_experts: int = 8) -> GroupedGemmCurve:
    return GroupedGemmCurve(
        dtype="bf16", backend="torch", phase=phase, num_experts=num_experts, source="measured", ref="a test",
        rows=(256, 1024)[: len(flops_per_s)], flops_per_s=flops_per_s,
    )  # fmt: skip


def profile_of(*curves: GroupedGemmCurve) -> HardwareProfile:
    return H100.model_copy(update={"grouped_gemm": curves})


def test_a_pass_has_its_own_curve_and_else_that_of_all_three() -> None:
    profile = profile_of(curve(None, 4e14), curve("fwd", 5e14))
    sustained = profile.sustained_frac.value
    flops = 8 * 2 * 1024 * 4096 * 7168
    assert grouped_seconds(profile, "bf16", "torch", SIZES, 8)[0] == pytest.approx(flops / 5e14 / sustained)
    backward_s, _ = grouped_seconds(profile, "bf16", "torch", SIZES, 8, phase="dgrad")
    assert backward_s == pytest.approx(flops / 4e14 / sustained)


def test_nearer_sizes_come_before_the_pass() -> None:
    profile = profile_of(curve(None, 4e14, num_experts=64), curve("fwd", 5e14))
    assert grouped_seconds(profile, "bf16", "torch", SIZES, 64)[1].curve.rate_at(256) == pytest.approx(4e14)


def test_curves_of_additions_are_for_nothing_else() -> None:
    profile = profile_of(curve("wgrad", 3e14), curve("wgrad_of_two", 4e14))
    assert grouped_seconds(profile, "bf16", "torch", SIZES, 8, phase="dgrad")[1].source == "assumed"
    assert added_weight_grad_seconds(profile_of(curve("fwd", 5e14)), "bf16", "torch", SIZES, 8, paired_frac=0) is None


@pytest.mark.parametrize("paired_frac, mean_s_per_flop", [(0, 1 / 1e14), (1, 1 / 2e14), (0.5, 0.75 / 1e14)])
def test_weight_gradients_are_read_at_the_rows_of_a_micro_batch(paired_frac: float, mean_s_per_flop: float) -> None:
    profile = profile_of(curve("wgrad", 1e14, 2e14), curve("wgrad_of_two", 2e14, 4e14))
    found = added_weight_grad_seconds(profile, "bf16", "torch", (4096, 7168, 256), 8, paired_frac=paired_frac)
    assert found
    assert found[0] == pytest.approx(8 * 2 * 4096 * 7168 * 256 * mean_s_per_flop / profile.sustained_frac.value)


@pytest.mark.parametrize("pairs", [(), (curve("wgrad_of_two", 4e14, num_experts=64),)])
def test_pairs_without_a_curve_take_as_long_as_one_by_one(pairs: tuple[GroupedGemmCurve, ...]) -> None:
    """Nor does a curve of other experts serve, whose rates differ for more than pairs."""
    profile = profile_of(curve("wgrad", 2e14), *pairs)
    alone, paired = (
        added_weight_grad_seconds(profile, "bf16", "torch", SIZES, 8, paired_frac=share) for share in (0, 1)
    )
    assert alone == paired


@given(rows=st.floats(1, 1e5), growth=st.floats(1, 10), share=st.floats(0, 1))
def test_more_rows_never_take_less_time(rows: float, growth: float, share: float) -> None:
    profile = profile_of(curve("wgrad", 1e14, 6e14), curve("wgrad_of_two", 2e14, 4e14))
    few, many = (
        added_weight_grad_seconds(profile, "bf16", "torch", (4096, 7168, number), 8, paired_frac=share)
        for number in (rows, rows * growth)
    )
    assert few
    assert many
    assert many[0] >= few[0] * (1 - 1e-12)
