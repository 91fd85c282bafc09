"""Seconds of one op on given hardware: one pure function a kind of op, in one literal table.

Every cost is the largest of what bounds it: arithmetic, device memory, links, or the shortest time of a kernel. More
work never takes less time, because every curve is monotone.
"""

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from moeplan.hwprofiles.schema import AttentionCurve, DispatchRate, HardwareProfile, Tier
from moeplan.simulator.collectives import NO_COST, UNMEASURED_LINK_FRAC, collective_cost
from moeplan.simulator.gemm_rates import dense_rate
from moeplan.simulator.grouped_gemm_rates import added_weight_grad_seconds, grouped_seconds
from moeplan.simulator.op import Bound, Cost, Op, OpKind

# H200 from 2k to 4k 534 to 616, GB200 from 4k to 8k 1319 to 1559 TFLOP/s (hardware facts section 5).
SHORT_SEQUENCE_EXPONENT = 0.22
# Side of the output tile of the largest kernels, two SMs of Blackwell together.
TILE = 256
CostFunction = Callable[[Op, HardwareProfile], Cost]
# Attention core without a curve: rate of GEMMs times this (H200 cuDNN 612 of 780 forward, hardware facts section 5).
ATTENTION_OVER_GEMM_FRAC = 0.7


def cost(op: Op, profile: HardwareProfile) -> Cost:
    """Seconds of ``op`` alone on one rank, what bounds it and where the figure comes from."""
    return COSTS[op.kind](op, profile)


def _gemm(op: Op, profile: HardwareProfile) -> Cost:
    rate = dense_rate(profile, op.dtype)
    rows, cols, inner = _tiled(op, profile)
    seconds = rate.seconds(rows, cols, inner) * op.num_groups / op.rate_frac
    return _roofline(op, profile, Cost(seconds, "compute", rate.source, rate.error_frac, rate.note))


def _grouped_gemm(op: Op, profile: HardwareProfile) -> Cost:
    what = (profile, op.dtype, op.backend, _tiled(op, profile), op.num_groups)
    added = added_weight_grad_seconds(*what, paired_frac=op.paired_frac) if op.adds_fp32 else None
    if added:  # the reading has the additions
        op = replace(op, epilogue_hbm_bytes=0.0)
    # A weight gradient that is only written is a product like an input gradient.
    seconds, rate = added or grouped_seconds(
        *what, phase="fwd" if op.phase == "fwd" else "dgrad", rate_frac=op.rate_frac
    )
    return _roofline(op, profile, Cost(seconds, "compute", rate.source, rate.error_frac, rate.note))


def _tiled(op: Op, profile: HardwareProfile) -> tuple[float, float, float]:
    """Rows, columns and inner dimension of a GEMM, its output in whole tiles on a GPU: 2880 columns take 3072."""
    if profile.device != "cuda":
        return op.rows, op.cols, op.inner

    def padded(size: float) -> float:
        return ceil(size / TILE) * TILE if size > TILE else size

    return padded(op.rows), padded(op.cols), op.inner


def _roofline(op: Op, profile: HardwareProfile, compute: Cost) -> Cost:
    if profile.overlaps_gemm_epilogue and op.epilogue_hbm_bytes:
        op = replace(op, hbm_bytes=op.hbm_bytes + op.epilogue_hbm_bytes, epilogue_hbm_bytes=0.0)
    memory = _memory(op, profile)
    larger = compute if compute.seconds >= memory.seconds else memory
    if not op.epilogue_hbm_bytes:
        return larger
    rate = profile.hbm_bytes_per_s.value * profile.hbm_efficiency_frac.value
    seconds = larger.seconds + op.epilogue_hbm_bytes / rate
    return Cost(seconds, larger.bound, larger.source, larger.error_frac, larger.note)


def _memory(op: Op, profile: HardwareProfile) -> Cost:
    return _moved(op, profile, profile.hbm_efficiency_frac.value)


def _gather(op: Op, profile: HardwareProfile) -> Cost:
    return _moved(op, profile, profile.gather_efficiency_frac.value)


def _moved(op: Op, profile: HardwareProfile, efficiency_frac: float) -> Cost:
    """Bytes over the part of memory bandwidth such kernels reach, and at least the floor of each kernel."""
    rate = profile.hbm_bytes_per_s.value * efficiency_frac
    seconds = op.hbm_bytes / min(rate, op.most_bytes_per_s or rate)
    floor_s = op.num_kernels * profile.kernel_floor_s.value
    source = profile.hbm_bytes_per_s
    error_frac = max(source.error_bar_frac, profile.hbm_efficiency_frac.error_bar_frac)
    if seconds >= floor_s:
        return Cost(seconds, "hbm", source.source, error_frac)
    return Cost(floor_s, "latency", profile.kernel_floor_s.source, profile.kernel_floor_s.error_bar_frac)


def _attention(op: Op, profile: HardwareProfile) -> Cost:
    """Read off at twice the mean number of keys a token sees (a causal sequence's own length): ``seq_len``."""
    curve = _nearest_attention(profile, op)
    if curve is None:
        dense = dense_rate(profile, op.dtype if op.dtype in {"fp32", "fp64"} else "bf16")
        rate = dense.curve.rate_at(max(op.seq_len, 1.0)) * dense.scale_frac * ATTENTION_OVER_GEMM_FRAC
        note = f"attention[{op.dtype} {op.qk_head_dim}/{op.v_head_dim}]: {ATTENTION_OVER_GEMM_FRAC:g} x the GEMM rate"
        return _roofline(op, profile, Cost(op.flops / rate / op.rate_frac, "compute", "assumed", 0.3, note))
    seconds = op.flops / _attention_rate(curve, op.seq_len) / op.rate_frac
    exact = (curve.dtype, curve.qk_head_dim, curve.v_head_dim) == (op.dtype, op.qk_head_dim, op.v_head_dim)
    label = f"attention[{curve.dtype} {curve.phase} {curve.qk_head_dim}/{curve.v_head_dim}]"
    if exact:
        note = label if curve.source == "assumed" else ""
        return _roofline(op, profile, Cost(seconds, "compute", curve.source, curve.error_bar_frac, note))
    note = f"attention {op.qk_head_dim}/{op.v_head_dim}: the rate of {label}"
    return _roofline(op, profile, Cost(seconds, "compute", "assumed", max(0.2, curve.error_bar_frac), note))


def _attention_rate(curve: AttentionCurve, seq_len: float) -> float:
    """The curve's rate; below its first sequence the rate falls as readings of other head sizes do."""
    first = curve.curve.sizes[0]
    short: float = min(1.0, seq_len / first) ** SHORT_SEQUENCE_EXPONENT
    return curve.curve.rate_at(max(seq_len, first)) * short


def _nearest_attention(profile: HardwareProfile, op: Op) -> AttentionCurve | None:
    """The curve of the op's type and phase with the nearest head sizes."""
    phase = "fwd" if op.phase == "fwd" else "bwd"
    fitting = [curve for curve in profile.attention if curve.phase == phase and curve.dtype == op.dtype]
    return min(
        fitting,
        key=lambda curve: abs(curve.qk_head_dim - op.qk_head_dim) + abs(curve.v_head_dim - op.v_head_dim),
        default=None,
    )


def _exchange(op: Op, profile: HardwareProfile) -> Cost:
    """The slower of both tiers, which a dispatcher drives at the same time: latency + bytes sent over the rate."""
    sent: tuple[tuple[Tier, float], ...] = (("scale_up", op.comm_bytes), ("network", op.network_bytes))
    costs = [_exchange_tier(op.backend, tier, num_bytes, profile) for tier, num_bytes in sent if num_bytes > 0]
    if not costs:
        return NO_COST
    slowest = max(costs, key=lambda one: one.seconds)
    if not op.wait_s:
        return slowest
    return replace(slowest, seconds=slowest.seconds + op.wait_s)


def _exchange_tier(backend: str, tier: Tier, num_bytes: float, profile: HardwareProfile) -> Cost:
    found = dispatch_rate(profile, backend, tier)
    if found is None:
        is_inside = tier == "scale_up"
        link = (
            profile.scale_up_bytes_per_s_per_dir_per_gpu if is_inside else profile.network_bytes_per_s_per_dir_per_gpu
        )
        note = f"dispatch[{backend} {tier}]: no rate, {UNMEASURED_LINK_FRAC:g} of the link's peak"
        return Cost(num_bytes / (link.value * UNMEASURED_LINK_FRAC), "network", "assumed", 0.3, note)
    rate = found.bytes_per_s_per_gpu
    sending_s, latency_s = num_bytes / rate.value, found.latency_s.value
    note = f"dispatch[{backend} {tier}]" if rate.source == "assumed" else ""
    bound: Bound = "network" if sending_s > latency_s else "latency"
    return Cost(sending_s + latency_s, bound, rate.source, rate.error_bar_frac, note)


def dispatch_rate(profile: HardwareProfile, backend: str, tier: Tier) -> DispatchRate | None:
    """The profile's rate of a dispatcher on one tier; None where there is none. torch sends by all-to-alls as well."""
    wanted = "alltoall" if backend == "torch" else backend
    return next((rate for rate in profile.dispatch if rate.backend == wanted and rate.tier == tier), None)


def _collective(op: Op, profile: HardwareProfile) -> Cost:
    assert op.kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
    one = collective_cost(op.kind, op.comm_bytes / op.num_messages, op.group, profile)
    return replace(one, seconds=one.seconds * op.num_messages)


COSTS: dict[OpKind, CostFunction] = {
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "attention": _attention,
    "memory": _memory,
    "gather": _gather,
    "exchange": _exchange,
    "all_gather": _collective,
    "reduce_scatter": _collective,
    "all_reduce": _collective,
    "all_to_all": _collective,
    "send_recv": _collective,
}
