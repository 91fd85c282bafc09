"""Costs of single ops: total table, monotone in work, slower on slower machines."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import GroupedGemmCurve, HardwareProfile
from moeplan.simulator.costs import COSTS, cost
from moeplan.simulator.op import OP_KINDS, Op, OpKind, Phase, Placement

PROFILE = load_profile("h100")
GROUP = Placement(16, 2)


def make(kind: OpKind, size: float) -> Op:
    """An op of any kind whose work grows with ``size``."""
    return Op(
        name=kind,
        kind=kind,
        family="dense_gemm",
        rows=size,
        cols=4096,
        inner=4096,
        num_groups=4,
        seq_len=4096,
        qk_head_dim=128,
        v_head_dim=128,
        flops=size * 4096 * 4096 * 2,
        hbm_bytes=size * 8192,
        comm_bytes=size * 8192,
        network_bytes=size * 4096,
        backend="hybridep",
        group=GROUP,
    )


def test_every_kind_has_a_cost() -> None:
    assert set(COSTS) == set(OP_KINDS)


@given(
    kind=st.sampled_from(OP_KINDS),
    size=st.floats(1, 1e6),
    growth=st.floats(1, 8),
)
def test_more_work_never_takes_less_time(kind: OpKind, size: float, growth: float) -> None:
    assert cost(make(kind, size * growth), PROFILE).seconds >= cost(make(kind, size), PROFILE).seconds * (1 - 1e-12)


def slower(profile: HardwareProfile, factor: float) -> HardwareProfile:
    """The same machine with memory and exchange rates divided by ``factor``."""
    memory = profile.hbm_bytes_per_s
    rates = tuple(
        rate.model_copy(
            update={
                "bytes_per_s_per_gpu": rate.bytes_per_s_per_gpu.model_copy(
                    update={"value": rate.bytes_per_s_per_gpu.value / factor, "low": None}
                )
            }
        )
        for rate in profile.dispatch
    )
    return profile.model_copy(
        update={
            "hbm_bytes_per_s": memory.model_copy(update={"value": memory.value / factor, "low": None}),
            "dispatch": rates,
        }
    )


@given(kind=st.sampled_from(OP_KINDS), size=st.floats(1, 1e6), factor=st.floats(1, 10))
def test_less_bandwidth_never_takes_less_time(kind: OpKind, size: float, factor: float) -> None:
    op = make(kind, size)
    assert cost(op, slower(PROFILE, factor)).seconds >= cost(op, PROFILE).seconds


def test_memory_bound_op_is_bytes_over_reached_bandwidth() -> None:
    op = Op(name="norm", kind="memory", family="elementwise", hbm_bytes=1e9)
    reached = PROFILE.hbm_bytes_per_s.value * PROFILE.hbm_efficiency_frac.value
    assert cost(op, PROFILE).seconds == pytest.approx(1e9 / reached)
    assert cost(op, PROFILE).bound == "hbm"


def test_small_kernel_is_bound_by_its_floor() -> None:
    op = Op(name="norm", kind="memory", family="elementwise", hbm_bytes=1, num_kernels=3)
    assert cost(op, PROFILE).seconds == pytest.approx(3 * PROFILE.kernel_floor_s.value)
    assert cost(op, PROFILE).bound == "latency"


def test_attention_of_an_unmeasured_head_size_is_assumed_and_says_so() -> None:
    odd = replace(make("attention", 4096), qk_head_dim=96, v_head_dim=96)
    assert cost(odd, PROFILE).source == "assumed"
    assert "96/96" in cost(odd, PROFILE).note


def test_blackwell_writes_outputs_beside_products_and_hopper_after_them() -> None:
    """Epilogue bytes of a compute-bound GEMM lengthen it only where one tile's accumulators fill the registers."""
    for name, hides in (("h100", False), ("b200", True), ("gb300", True)):
        profile = load_profile(name)
        plain = Op(name="wgrad", kind="gemm", family="dense_gemm", rows=7168, cols=4096, inner=16384)
        added = replace(plain, epilogue_hbm_bytes=8 * 7168 * 4096)
        assert (cost(added, profile).seconds == cost(plain, profile).seconds) is hides
        assert cost(replace(added, inner=64), profile).seconds > cost(replace(plain, inner=64), profile).seconds


def test_additions_that_a_curve_holds_are_not_counted_again() -> None:
    """Nor are they left out of a gradient that the curve is not of: one that is not added to fp32."""
    curves = [
        GroupedGemmCurve(
            dtype="bf16", backend="torch", phase=phase, num_experts=8, rows=(1024,), flops_per_s=(5e14,),
            source="measured", ref="a test",
        )
        for phase in ("dgrad", "wgrad")
    ]  # fmt: skip
    profile = PROFILE.model_copy(update={"grouped_gemm": tuple(curves)})
    op = replace(
        make("grouped_gemm", 4096), phase="wgrad", inner=1024, num_groups=8, backend="torch", adds_fp32=True,
        epilogue_hbm_bytes=8 * 8 * 4096 * 4096,
    )  # fmt: skip
    flops = 2 * 8 * 4096 * 4096 * 1024
    assert cost(op, profile).seconds == pytest.approx(flops / 5e14 / profile.sustained_frac.value)
    written = replace(op, adds_fp32=False)
    assert cost(written, profile).seconds > cost(replace(written, epilogue_hbm_bytes=0), profile).seconds


@pytest.mark.parametrize("hardware", ["h100", "h200", "b200", "gb300"])
@pytest.mark.parametrize("phase", ["fwd", "dgrad"])
def test_attention_takes_a_curve_of_its_own_phase_and_type(hardware: str, phase: Phase) -> None:
    profile = load_profile(hardware)
    op = replace(make("attention", 4096), phase=phase, dtype="bf16", hbm_bytes=0)
    (curve,) = (
        one
        for one in profile.attention
        if (one.phase, one.dtype, one.qk_head_dim, one.v_head_dim) == (phase.replace("dgrad", "bwd"), "bf16", 128, 128)
    )
    assert cost(op, profile).seconds == pytest.approx(op.flops / curve.curve.rate_at(4096))
