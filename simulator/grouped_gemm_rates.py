"""Times of the experts' products in one call, from rate-by-rows curves of a back end or from the dense curve.

A curve is of one pass or of all three, a curve of weight gradients also of what adds them to fp32 main gradients.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from moeplan.hwprofiles.schema import GroupedGemmCurve, GroupedGemmPhase, HardwareProfile
from moeplan.simulator.gemm_rates import Rate, dense_rate

# Rows of an output tile of CUTLASS and cuBLAS kernels: a smaller group takes as long.
TILE_ROWS = 64
Sizes = tuple[float, float, float]  # rows, columns and inner dimension of a group's product


def grouped_seconds(
    profile: HardwareProfile,
    dtype: str,
    backend: str,
    sizes: Sizes,
    num_groups: int,
    *,
    phase: GroupedGemmPhase = "fwd",
    rate_frac: float = 1.0,
) -> tuple[float, Rate]:
    """Seconds of ``num_groups`` GEMMs of ``sizes`` in one call, and the rate used.

    From the back end's own curve (rate by rows of a group), the one with the nearest sizes. Otherwise the groups fill
    the machine together: ``rate_frac`` of the dense rate at all rows, rows padded to whole tiles.
    """
    rows, cols, inner = sizes
    if curves := _curves(profile, dtype, backend, None, phase):
        rate = _rate(profile, _nearest(curves, num_groups))
        return num_groups * 2 * cols * inner * rate.curve.time_at(rows) / rate.scale_frac, rate
    dense = dense_rate(profile, dtype)
    note = f"grouped_gemm[{dtype} {backend}]: {rate_frac:g} x the dense rate at all rows"
    rate = replace(
        dense,
        scale_frac=dense.scale_frac * rate_frac,
        source="assumed",
        error_frac=max(0.2, dense.error_frac),
        note=note,
    )
    padded = max(rows, TILE_ROWS)
    return rate.seconds(padded * num_groups, cols, inner), rate


def added_weight_grad_seconds(
    profile: HardwareProfile, dtype: str, backend: str, sizes: Sizes, num_groups: int, *, paired_frac: float
) -> tuple[float, Rate] | None:
    """Seconds of one micro-batch's weight gradients, additions to fp32 main gradients included; None without a curve.

    ``sizes`` are the weight's two sides and the rows of an expert; ``paired_frac`` of the micro-batches are added two
    at a time, at the rate of ``wgrad_of_two`` of as many experts, or else as they are one by one.
    """
    curves = _curves(profile, dtype, backend, "wgrad")
    if not curves:
        return None
    alone = _nearest(curves, num_groups)
    of_two = _curves(profile, dtype, backend, "wgrad_of_two")
    # Of other experts than those of the other curve, it would tell more of the experts than of pairs.
    in_pairs = next((one for one in of_two if one.num_experts == alone.num_experts), alone)
    height, width, rows = sizes
    rates = [_rate(profile, curve) for curve in (alone, in_pairs)]
    each_s = [rate.curve.time_at(rows) / rate.scale_frac for rate in rates]
    mean_s = (1 - paired_frac) * each_s[0] + paired_frac * each_s[1]
    return num_groups * 2 * height * width * mean_s, rates[0]


def _curves(
    profile: HardwareProfile, dtype: str, backend: str, *phases: GroupedGemmPhase | None
) -> list[GroupedGemmCurve]:
    return [
        curve
        for curve in profile.grouped_gemm
        if curve.dtype == dtype and curve.backend == backend and curve.phase in phases
    ]


def _nearest(curves: Sequence[GroupedGemmCurve], num_groups: int) -> GroupedGemmCurve:
    """That of the nearest number of experts; of two the one of its pass alone."""
    return min(curves, key=lambda one: (_distance(one.num_experts, num_groups), one.phase is None))


def _distance(measured: int | None, wanted: int) -> float:
    return math.inf if measured is None else abs(math.log(measured / wanted))


def _rate(profile: HardwareProfile, curve: GroupedGemmCurve) -> Rate:
    note = f"grouped_gemm[{curve.dtype} {curve.backend}]" if curve.source == "assumed" else ""
    return Rate(curve.curve, profile.sustained_frac.value, curve.source, curve.error_bar_frac, note)
