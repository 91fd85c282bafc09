"""Units and how they are written for people. Inside moeplan: bytes, seconds, FLOP, FLOP/s, bytes/s, fractions.

A leaf module: imports nothing of ours, because kernels use it too.
"""

KIB, MIB, GIB = 2**10, 2**20, 2**30
MB, GB, TB = 10**6, 10**9, 10**12
GFLOP, TFLOP = 10**9, 10**12
MICROSECOND, MILLISECOND = 1e-6, 1e-3
HOUR_S, DAY_S = 3600.0, 86400.0

# Bytes an element takes in storage, scales not included.
DTYPE_BYTES: dict[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int64": 8,
    "int32": 4,
    "bool": 1,
}


def format_bytes(num_bytes: float) -> str:
    """Memory in GiB or MiB, always with the unit."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / MIB:.1f} MiB"


def format_seconds(seconds: float) -> str:
    """A time with three significant digits in s, ms or us; below a nanosecond it is rounding, and zero."""
    if abs(seconds) < MICROSECOND / 1000:
        return "0 s"
    if abs(seconds) >= 1:
        return f"{seconds:.3g} s" if abs(seconds) < 1000 else f"{seconds:.0f} s"
    if abs(seconds) >= MILLISECOND:
        return f"{seconds / MILLISECOND:.3g} ms"
    return f"{seconds / MICROSECOND:.3g} us"


def format_count(number: float) -> str:
    """A parameter or token count as 671.0 B, 3.3 M or 812."""
    for scale, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= scale:
            return f"{number / scale:.1f}{suffix}"
    return f"{number:.0f}"
