"""From the readings of a GPU to its hardware profile, laid over the preset of the same GPU.

What one GPU cannot measure (networks, collectives of a whole domain, prices, failures) keeps the preset's figure and
source.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, get_args

import torch

from moeplan.errors import InvalidInputError
from moeplan.executor.measure import spread_frac
from moeplan.executor.microbench_cuda import TYPICAL_INNER
from moeplan.executor.microbench_cuda_experts import BACKENDS, EXPERT_SHAPES
from moeplan.executor.microbench_profile import Table, measured_curve, measured_gemm, rounded
from moeplan.executor.microbench_window import Reading
from moeplan.hwprofiles.load import load_profile, profile_names
from moeplan.hwprofiles.schema import (
    AttentionCurve,
    CollectiveCurve,
    CollectiveKind,
    GroupedGemmCurve,
    GroupedGemmPhase,
    HardwareProfile,
    Sourced,
)


def base_profile(device_name: str) -> HardwareProfile:
    """The preset of a GPU by the driver's name for it. InvalidInputError where moeplan has none."""
    words = re.findall(r"[a-z]+\d+[a-z]*", device_name.lower())
    for word in words:
        if word in profile_names():
            return load_profile(word)
    raise InvalidInputError(
        f"calibrate: no preset for {device_name!r}, allowed: {', '.join(profile_names())}",
        "write a profile with base = the nearest preset and your own figures",
    )


def profile_from_cuda_readings(
    readings: Iterable[Reading], answer: Mapping[str, Any], num_gpus: int
) -> HardwareProfile:
    """The preset of the device with every figure that was measured in place of its own.

    ``answer`` holds ``device``, ``memory_bytes``, ``num_sms``, ``overheads_bytes``, ``power`` and ``packages``.
    """
    tables: dict[str, Table] = defaultdict(lambda: defaultdict(list))
    for reading in readings:
        tables[reading.name][reading.size] += reading.values
    return _Builder(tables, answer, num_gpus).profile(base_profile(answer["device"]))


class _Builder:
    """Fields of the profile from tables of readings by name."""

    def __init__(self, tables: dict[str, Table], answer: Mapping[str, Any], num_gpus: int) -> None:
        self.tables, self.answer, self.num_gpus = tables, answer, num_gpus
        power = answer["power"].get("mean_power")
        also = "".join(f", {what}" for what in (answer["packages"], power) if what)
        self.ref = f"moeplan calibrate, {num_gpus} x {answer['device']}, torch {torch.__version__}{also}"

    def profile(self, base: HardwareProfile) -> HardwareProfile:
        peak_bytes_per_s = base.hbm_bytes_per_s.value
        changes: dict[str, Any] = {
            "description": f"{base.description}; compute, memory and host measured on this machine",
            "memory_bytes": self._measured([float(self.answer["memory_bytes"])], "total of the driver"),
            "num_sms": self._measured([float(self.answer["num_sms"])], "the driver"),
            "framework_overhead_bytes": self._measured(
                self.answer["overheads_bytes"], "beside the allocator's: context, kernels loaded, NCCL"
            ),
            "hbm_efficiency_frac": self._share(
                peak_bytes_per_s, self._values("memory.elementwise"), f"element-wise; {self._also_memory()}"
            ),
            "gather_efficiency_frac": self._gather_share(peak_bytes_per_s),
            "host_link_bytes_per_s_per_dir_per_gpu": self._host_link(),
            "launch_s": self._measured(self._values("launch"), "an eager op with autograd"),
            "kernel_floor_s": self._measured(self._values("floor"), "16 numbers, in a graph"),
            "sustained_frac": self._measured([1.0], f"tables are of seconds of load; {self._burst()}"),
            "gemm": (
                measured_gemm(self.tables, "bf16", TYPICAL_INNER, self.ref),
                *(curve for curve in base.gemm if curve.dtype != "bf16"),
            ),
            "grouped_gemm": (*self._grouped_gemms(), *(one for one in base.grouped_gemm if not _is_ours(one))),
            "attention": self._merged_attention(base),
            "collectives": self._merged_collectives(base),
        }
        return base.model_copy(update=changes)

    def _values(self, name: str) -> list[float]:
        return [value for values in self.tables[name].values() for value in values]

    def _measured(self, values: Sequence[float], note: str) -> Sourced:
        """The median, with the spread as error bar where there are several values."""
        error_frac = round(max(0.01, spread_frac(values)), 3) if len(values) > 1 else None
        value = rounded(statistics.median(values))
        return Sourced(value=value, source="measured", ref=f"{self.ref}; {note}", error_frac=error_frac)

    def _share(self, peak: float, values: Sequence[float], note: str) -> Sourced:
        return self._measured([min(1.0, value / peak) for value in values], note)

    def _also_memory(self) -> str:
        copy, adam = (statistics.median(self._values(f"memory.{name}")) / 1e12 for name in ("copy", "adam"))
        return f"copy {copy:.2f} TB/s, fused Adam {adam:.2f} TB/s"

    def _gather_share(self, peak: float) -> Sourced:
        """Harmonic mean of permute and unpermute, each the median over its shapes: a layer runs both as often."""
        there, back = (statistics.median(self._values(f"memory.{name}")) for name in ("permute", "unpermute"))
        note = f"permute {there / 1e12:.2f}, unpermute {back / 1e12:.2f} TB/s; their harmonic mean"
        error_frac = round(abs(there - back) / (there + back), 3)
        share = rounded(min(1.0, statistics.harmonic_mean([there, back]) / peak))
        return Sourced(value=share, source="measured", ref=f"{self.ref}; {note}", error_frac=error_frac)

    def _host_link(self) -> Sourced:
        """The slower way."""
        ways = {way: statistics.median(self._values(f"host_link.{way}")) for way in ("to_device", "to_host")}
        note = ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in ways.items())
        return Sourced(value=rounded(min(ways.values())), source="measured", ref=f"{self.ref}; pinned memory: {note}")

    def _burst(self) -> str:
        return f"8192 cubed reads {statistics.median(self._values('peak.bf16')) / 1e12:.0f} TFLOP/s in a burst"

    def _curve(self, table: Table, size_key: str, value_key: str) -> dict[str, Any]:
        return measured_curve(table, size_key, value_key, self.ref)

    def _grouped_gemms(self) -> Iterable[GroupedGemmCurve]:
        """By pass, of the fastest kernels that a plan may take: names are those of the native stack."""
        for backend, phase, (num_experts, hidden, ffn) in product(BACKENDS, get_args(GroupedGemmPhase), EXPERT_SHAPES):
            if table := self.tables.get(f"grouped_gemm.{backend}.{phase}.{num_experts}"):
                yield GroupedGemmCurve(
                    dtype="bf16",
                    backend=backend,
                    phase=phase,
                    num_experts=num_experts,
                    hidden_size=hidden,
                    expert_ffn_size=ffn,
                    **self._curve(table, "rows", "flops_per_s"),
                )

    def _merged_attention(self, base: HardwareProfile) -> tuple[AttentionCurve, ...]:
        curves = {(one.dtype, one.phase, one.qk_head_dim, one.v_head_dim): one for one in base.attention}
        for name, table in list(self.tables.items()):
            if name.startswith("attention.") and table:
                _, phase, qk_dim, v_dim = name.split(".")
                curve = AttentionCurve(
                    dtype="bf16",
                    phase=phase,
                    qk_head_dim=int(qk_dim),
                    v_head_dim=int(v_dim),
                    **self._curve(table, "seq_len", "flops_per_s"),
                )
                curves["bf16", curve.phase, curve.qk_head_dim, curve.v_head_dim] = curve
        return tuple(curves.values())

    def _merged_collectives(self, base: HardwareProfile) -> tuple[CollectiveCurve, ...]:
        """Those measured between GPUs of this host; one GPU measures none."""
        curves = {(one.collective, one.tier, one.num_ranks): one for one in base.collectives}
        for kind in get_args(CollectiveKind):
            for num_ranks in {2, self.num_gpus}:
                if table := self.tables.get(f"{kind}.{num_ranks}"):
                    curve = self._curve(table, "message_bytes", "seconds")
                    measured = CollectiveCurve(collective=kind, tier="scale_up", num_ranks=num_ranks, **curve)
                    curves[kind, "scale_up", num_ranks] = measured
        return tuple(curves.values())


def _is_ours(curve: GroupedGemmCurve) -> bool:
    return curve.backend in BACKENDS and curve.dtype == "bf16"
