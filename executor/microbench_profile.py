"""From the readings of ``moeplan calibrate`` to a hardware profile. Medians; error bars are the spread of readings."""

import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from moeplan.executor.measure import spread_frac
from moeplan.executor.microbench_compute import DTYPES, TYPICAL_INNER
from moeplan.executor.microbench_window import Reading
from moeplan.hwprofiles.schema import (
    AttentionCurve,
    CollectiveCurve,
    CollectiveKind,
    DispatchRate,
    Dtype,
    GemmCurve,
    GroupedGemmCurve,
    HardwareProfile,
    Sourced,
)

Table = dict[float, list[float]]  # values by size
NUM_DIGITS = 4  # of every figure written


def profile_from_readings(
    readings: Iterable[Reading], overheads_bytes: Sequence[float], num_processes: int
) -> HardwareProfile:
    """The profile ``cpu-host`` of one process; ``overheads_bytes`` are those of each before its first tensor."""
    tables: dict[str, Table] = defaultdict(lambda: defaultdict(list))
    for reading in readings:
        tables[reading.name][reading.size] += reading.values
    return _Builder(tables, num_processes).profile(overheads_bytes)


class _Builder:
    """Fields of the profile from tables of readings by name."""

    def __init__(self, tables: dict[str, Table], num_processes: int) -> None:
        self.tables = tables
        self.num_processes = num_processes
        self.ref = f"moeplan calibrate, {num_processes} processes, torch {torch.__version__}, {cpu_model()}"

    def profile(self, overheads_bytes: Sequence[float]) -> HardwareProfile:
        memory_bytes_per_s = self._best("memory.copy", "memory.elementwise", "memory.gather", "memory.adam")
        link = self._link_bytes_per_s(memory_bytes_per_s)
        return HardwareProfile(
            name="cpu-host",
            description=f"one of {self.num_processes} processes on {cpu_model()}, {num_cores()} cores",
            device="cpu",
            scale_up_domain_gpus=self._measured([float(self.num_processes)]),
            peak_flops_per_s={dtype: self._best(f"peak.{dtype}", *_also(dtype)) for dtype in DTYPES},
            memory_bytes=self._measured([machine_memory_bytes() / self.num_processes]),
            framework_overhead_bytes=self._measured(
                [overhead + statistics.median(self._values("first_step")) for overhead in overheads_bytes],
                "torch loaded, processes connected, and what a first training step loads",
            ),
            hbm_bytes_per_s=memory_bytes_per_s,
            hbm_efficiency_frac=self._share_of(memory_bytes_per_s, "memory.elementwise", "memory.adam"),
            gather_efficiency_frac=self._share_of(memory_bytes_per_s, "memory.gather"),
            scale_up_bytes_per_s_per_dir_per_gpu=link,
            network_bytes_per_s_per_dir_per_gpu=_assumed(link.value, "one host has no network: its loopback rate"),
            host_link_bytes_per_s_per_dir_per_gpu=_assumed(
                memory_bytes_per_s.value, "a CPU has no device to copy to: its memory bandwidth"
            ),
            launch_s=self._measured(self._values("launch")),
            kernel_floor_s=self._measured(self._values("floor")),
            allocator_reserve_frac=self._measured(
                self._values("allocator_reserve"), "growth of training steps over their saved tensors, minus 1"
            ),
            sustained_frac=self._measured([1.0], "tables hold medians over seconds of load, not bursts"),
            host_memory_bytes_per_gpu=self._measured([machine_memory_bytes() / self.num_processes]),
            gemm=(measured_gemm(self.tables, "fp32", TYPICAL_INNER, self.ref),),
            grouped_gemm=tuple(self._grouped_gemms()),
            attention=tuple(self._attentions()),
            collectives=tuple(self._collectives()),
            dispatch=self._dispatch(),
        )

    def _values(self, name: str) -> list[float]:
        return [value for values in self.tables[name].values() for value in values]

    def _measured(self, values: Sequence[float], note: str = "") -> Sourced:
        """The median, with the spread as error bar where there are several values."""
        error_frac = _error_frac([values]) if len(values) > 1 else None
        ref = f"{self.ref}; {note}" if note else self.ref
        return Sourced(value=rounded(statistics.median(values)), source="measured", ref=ref, error_frac=error_frac)

    def _best(self, *names: str) -> Sourced:
        """The largest median of any size of these tables: what the machine can do."""
        medians = [statistics.median(values) for name in names for values in self.tables[name].values()]
        return Sourced(
            value=rounded(max(medians)), source="measured", ref=f"{self.ref}; the best of {', '.join(names)}"
        )

    def _share_of(self, best: Sourced, *names: str) -> Sourced:
        values = [min(1.0, value / best.value) for name in names for value in self._values(name)]
        return self._measured(values, f"median of {', '.join(names)} over the best")

    def _curve(self, table: Table, size_key: str, value_key: str) -> dict[str, Any]:
        return measured_curve(table, size_key, value_key, self.ref)

    def _grouped_gemms(self) -> Iterable[GroupedGemmCurve]:
        for name, num_experts in self._numbered("grouped_gemm"):
            curve = self._curve(self.tables[name], "rows", "flops_per_s")
            yield GroupedGemmCurve(dtype="fp32", backend="torch", num_experts=num_experts, **curve)

    def _attentions(self) -> Iterable[AttentionCurve]:
        for phase in ("fwd", "bwd"):
            for name, head_dim in self._numbered(f"attention.{phase}"):
                curve = self._curve(self.tables[name], "seq_len", "flops_per_s")
                yield AttentionCurve(dtype="fp32", phase=phase, qk_head_dim=head_dim, v_head_dim=head_dim, **curve)

    def _collectives(self) -> Iterable[CollectiveCurve]:
        for kind in get_args(CollectiveKind):
            for name, num_ranks in self._numbered(kind):
                curve = self._curve(self.tables[name], "message_bytes", "seconds")
                yield CollectiveCurve(collective=kind, tier="scale_up", num_ranks=num_ranks, **curve)

    def _dispatch(self) -> tuple[DispatchRate, ...]:
        """The exchange of tokens as an all-to-all over all ranks: latency of the smallest, rate of the largest."""
        table = self.tables.get(f"all_to_all.{self.num_processes}")
        if not table:
            return ()
        smallest, largest = min(table), max(table)
        latency_s = statistics.median(table[smallest])
        sent_bytes = largest * (self.num_processes - 1) / self.num_processes
        rates = [sent_bytes / max(seconds - latency_s, seconds / 2) for seconds in table[largest]]
        rate = self._measured(rates, f"all_to_all of {largest:.0f} bytes, less latency")
        latency = self._measured(table[smallest], f"all_to_all of {smallest:.0f} bytes")
        return (DispatchRate(backend="alltoall", tier="scale_up", bytes_per_s_per_gpu=rate, latency_s=latency),)

    def _link_bytes_per_s(self, memory_bytes_per_s: Sourced) -> Sourced:
        """Best rate of send_recv; a single process has nobody to send to."""
        table = self.tables.get("send_recv.2")
        if not table:
            return _assumed(memory_bytes_per_s.value, "a single process sends to nobody: its memory bandwidth")
        rates = [size / statistics.median(values) for size, values in table.items()]
        return Sourced(value=rounded(max(rates)), source="measured", ref=f"{self.ref}; the best of send_recv")

    def _numbered(self, prefix: str) -> list[tuple[str, int]]:
        """Names ``prefix.NUMBER`` with their numbers, ascending."""
        numbers = {name: name.rpartition(".") for name in self.tables}
        found = [(name, int(tail)) for name, (head, _, tail) in numbers.items() if head == prefix and self.tables[name]]
        return sorted(found, key=lambda pair: pair[1])


def measured_curve(table: Table, size_key: str, value_key: str, ref: str) -> dict[str, Any]:
    """Fields of a measured curve of the profile: medians by size, and the spread as error bar."""
    sizes = sorted(table)
    return {
        size_key: tuple(sizes),
        value_key: tuple(rounded(statistics.median(table[size])) for size in sizes),
        "source": "measured",
        "ref": ref,
        "error_frac": _error_frac(table.values()),
    }


def measured_gemm(tables: dict[str, Table], dtype: Dtype, typical_inner: int, ref: str) -> GemmCurve:
    """The curve of dense GEMMs over rows, at the inner size that was typical, with what a short inner size costs."""
    inner = {size: statistics.median(values) for size, values in tables["gemm_inner"].items()}
    return GemmCurve(
        dtype=dtype,
        typical_inner=typical_inner,
        inner_overhead=rounded(fitted_inner_overhead(inner)),
        **measured_curve(tables["gemm"], "rows", "flops_per_s", ref),
    )


def fitted_inner_overhead(seconds_by_inner: dict[float, float]) -> float:
    """K0 of seconds = slope x (K + K0), least squares with each reading weighted by 1 / its seconds; at least 0."""
    weights = [(inner, seconds, 1 / seconds**2) for inner, seconds in seconds_by_inner.items()]
    total = sum(weight for *_, weight in weights)
    mean_inner = sum(inner * weight for inner, _, weight in weights) / total
    mean_s = sum(seconds * weight for _, seconds, weight in weights) / total
    covariance = sum(weight * (inner - mean_inner) * (seconds - mean_s) for inner, seconds, weight in weights)
    slope = covariance / sum(weight * (inner - mean_inner) ** 2 for inner, _, weight in weights)
    return max(0.0, mean_s / slope - mean_inner) if slope > 0 else 0.0


def cpu_model() -> str:
    """What the kernel calls the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def machine_memory_bytes() -> float:
    """Memory of the machine, or of the control group where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.exists() else "max"
    return float(min(total, int(text)) if text.isdigit() else total)


def _also(dtype: str) -> tuple[str, ...]:
    return ("gemm",) if dtype == "fp32" else ()


def _assumed(value: float, rule: str) -> Sourced:
    return Sourced(value=rounded(value), source="assumed", ref=rule)


def _error_frac(groups: Iterable[Sequence[float]]) -> float:
    """Median over sizes of the spread at one size; at least 1 %, at most the whole."""
    return round(min(1.0, max(0.01, statistics.median(spread_frac(values) for values in groups))), 3)


def rounded(value: float) -> float:
    """To the digits that a profile has."""
    return float(f"{value:.{NUM_DIGITS}g}")
