"""GEMM times from rate-by-rows curves, for shapes and number formats nobody measured.

A curve gives the rate by rows M as a median over wide N and K (2048 to 16384). A GEMM is as fast as its shorter
output side allows, so the curve is read at min(M, N). A short inner dimension pays for filling and draining: the rate
goes with K / (K + 400), against the 6000 typical of the curves. The 400 fits DeepGEMM on H800: 1520 TFLOP/s at K
16384, 1410 at 7168, 1212 at 1536, 775 at 512 (hardware facts, section 4.4).
"""

from dataclasses import dataclass

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.curves import MonotoneTime
from moeplan.hwprofiles.schema import DEFAULT_ERROR_FRAC, GemmCurve, HardwareProfile, SourceKind

INNER_OVERHEAD, TYPICAL_INNER = 400.0, 6000.0
PEAK_FRAC_WITHOUT_CURVE = 0.7
# Which measured format stands in for a missing one, nearest first; its rate is scaled by the ratio of the peaks.
NEAREST_DTYPES: dict[str, tuple[str, ...]] = {
    "mxfp8": ("fp8_block", "fp8", "bf16"),
    "fp8_block": ("mxfp8", "fp8", "bf16"),
    "fp8": ("fp8_block", "mxfp8", "bf16"),
    "nvfp4": ("fp8_block", "fp8", "bf16"),
    "bf16": ("fp32",),
    "fp32": ("tf32",),
    "tf32": ("fp32",),
    "fp64": ("fp32",),
}


@dataclass(frozen=True, slots=True)
class Rate:
    """Where a GEMM rate comes from: a curve (of time by rows) whose rate is multiplied by ``scale_frac``.

    ``typical_inner`` and ``inner_overhead`` are the curve's own where it states them.
    """

    curve: MonotoneTime
    scale_frac: float
    source: SourceKind
    error_frac: float
    note: str = ""
    typical_inner: float = TYPICAL_INNER
    inner_overhead: float = INNER_OVERHEAD

    def seconds(self, rows: float, cols: float, inner: float) -> float:
        """One GEMM: 2 M N (K + overhead) over the rate at min(M, N), the typical inner dimension divided out.

        Non-decreasing in all three: time_at(min) is, and so is min / time_at(min) x the longer side.
        """
        shorter, longer = min(rows, cols), max(rows, cols)
        typical = self.typical_inner / (self.typical_inner + self.inner_overhead)
        return 2 * longer * (inner + self.inner_overhead) * typical * self.curve.time_at(shorter) / self.scale_frac


def dense_rate(profile: HardwareProfile, dtype: str) -> Rate:
    """The dense curve of ``dtype``, or of the nearest measured format scaled by peaks, or a part of a peak.

    InvalidInputError where the profile knows nothing of the format nor of any that could stand in.
    """
    peaks: dict[str, float] = {name: peak.value for name, peak in profile.peak_flops_per_s.items()}
    curves: dict[str, GemmCurve] = {curve.dtype: curve for curve in profile.gemm}
    sustained, assumed_frac = profile.sustained_frac.value, DEFAULT_ERROR_FRAC["assumed"]
    others = NEAREST_DTYPES.get(dtype, ())
    for other in (dtype, *others):
        curve = curves.get(other)
        if curve is None:
            continue
        if other == dtype:
            note = f"gemm[{dtype}]" if curve.source == "assumed" else ""
            return Rate(curve.curve, sustained, curve.source, curve.error_bar_frac, note, *_inner(curve))
        ratio = _ratio(peaks, dtype, other)
        note = f"gemm[{dtype}]: the {other} curve x {ratio:.3g}"
        return Rate(curve.curve, sustained * ratio, "assumed", assumed_frac, note)
    for other in (dtype, *others):
        if other in peaks:
            share = PEAK_FRAC_WITHOUT_CURVE * _ratio(peaks, dtype, other)
            note = f"gemm[{dtype}]: no curve, {share:g} of the {other} peak"
            return Rate(MonotoneTime.from_rates([1.0], [peaks[other]]), share, "assumed", assumed_frac, note)
    raise InvalidInputError(
        f"hardware {profile.name}: no GEMM rate for {dtype}, allowed: {', '.join(sorted(peaks)) or 'none'}",
        f"add peak_flops_per_s.{dtype} or a [[gemm]] curve to the profile",
    )


def _ratio(peaks: dict[str, float], dtype: str, other: str) -> float:
    """Rate of a format over that of its stand-in, from their peaks.

    Without peaks: one half for fp64, of which a vector register holds half as many; otherwise one.
    """
    if dtype == other:
        return 1.0
    if dtype in peaks and other in peaks:
        return peaks[dtype] / peaks[other]
    return 0.5 if dtype == "fp64" else 1.0


def _inner(curve: GemmCurve) -> tuple[float, float]:
    """The curve's typical inner dimension and its overhead, or those of the GPU readings."""
    typical = TYPICAL_INNER if curve.typical_inner is None else curve.typical_inner
    return typical, INNER_OVERHEAD if curve.inner_overhead is None else curve.inner_overhead
