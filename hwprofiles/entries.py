"""Every figure of a profile with its unit, source and error bar: what ``moeplan hardware show`` prints."""

from collections.abc import Iterator
from dataclasses import dataclass

from moeplan.hwprofiles.schema import (
    AttentionCurve,
    CollectiveCurve,
    DispatchRate,
    GemmCurve,
    GroupedGemmCurve,
    HardwareProfile,
    Provenance,
    Sourced,
    SourceKind,
)
from moeplan.record import Record

# Unit by what a field's name holds; the first match counts.
_UNITS: tuple[tuple[str, str], ...] = (
    ("usd_per_gpu_hour", "USD/GPU-hour"),
    ("flops_per_s", "FLOP/s"),
    ("bytes_per_s", "B/s"),
    ("bytes", "B"),
    ("_frac", "fraction"),
    ("oversubscription", "ratio"),
    ("_watts", "W"),
    ("_gpu_hours", "GPU-hours"),
    ("_gpus", "GPUs"),
    ("num_sms", "SMs"),
    ("_s", "s"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One number or one table. ``value`` is None for a table; ``summary`` then says its range."""

    key_path: str
    unit: str
    value: float | None
    summary: str
    source: SourceKind
    ref: str
    error_bar_frac: float


def all_entries(profile: HardwareProfile) -> tuple[Entry, ...]:
    """Every number and table of the profile in the order of the schema, in base units (bytes, s, FLOP/s, B/s)."""
    return tuple(_entry(key_path, record) for key_path, record in _walk(profile))


def assumed_entries(profile: HardwareProfile) -> tuple[tuple[str, Provenance], ...]:
    """Key path and provenance of what nobody measured: each ``ref`` states the rule by which the figure was set."""
    return tuple((key_path, record) for key_path, record in _walk(profile) if record.source == "assumed")


def _walk(record: Record, prefix: str = "") -> Iterator[tuple[str, Provenance]]:
    for field in type(record).model_fields:
        value = getattr(record, field)
        if isinstance(value, Provenance):
            yield f"{prefix}{field}", value
        elif isinstance(value, dict):
            for key, number in value.items():
                yield f"{prefix}{field}.{key}", number
        elif isinstance(value, tuple):
            for item in value:
                if isinstance(item, Provenance):
                    yield f"{field}[{_label(item)}]", item
                elif isinstance(item, Record):
                    yield from _walk(item, f"{field}[{_label(item)}].")


def _label(item: Record) -> str:
    """What tells an entry of a list table from its neighbours."""
    match item:
        case GroupedGemmCurve():
            phase = "" if item.phase is None else f" {item.phase}"
            experts = "" if item.num_experts is None else f" {item.num_experts} experts"
            shape = "" if item.hidden_size is None else f" {item.hidden_size}x{item.expert_ffn_size}"
            return f"{item.dtype} {item.backend}{phase}{experts}{shape}"
        case GemmCurve():
            return item.dtype
        case AttentionCurve():
            return f"{item.dtype} {item.phase} {item.qk_head_dim}/{item.v_head_dim}"
        case CollectiveCurve():
            return f"{item.collective} {item.tier} x{item.num_ranks}"
        case DispatchRate():
            return f"{item.backend} {item.tier}"
        case _:
            raise TypeError(f"no label for {type(item).__name__}")


def _entry(key_path: str, record: Provenance) -> Entry:
    value: float | None = None
    if isinstance(record, Sourced):
        unit, value, summary = _unit(key_path), record.value, _number_summary(record)
    else:
        unit, summary = ("s" if isinstance(record, CollectiveCurve) else "FLOP/s"), _table_summary(record)
    return Entry(key_path, unit, value, summary, record.source, record.ref, record.error_bar_frac)


def _unit(key_path: str) -> str:
    is_peak = key_path.startswith("peak_flops_per_s.")  # the one field whose last key is a dtype
    name = "peak_flops_per_s" if is_peak else key_path.rsplit(".", maxsplit=1)[-1]
    return next(unit for part, unit in _UNITS if part in name)


def _number_summary(number: Sourced) -> str:
    if number.low is None and number.high is None:
        return f"{number.value:g}"
    low = "" if number.low is None else f"{number.low:g}"
    high = "" if number.high is None else f"{number.high:g}"
    return f"{number.value:g} ({low} to {high})"


def _table_summary(record: Provenance) -> str:
    match record:
        case GemmCurve():
            axis, sizes, readings = "rows", record.rows, record.flops_per_s
        case AttentionCurve():
            axis, sizes, readings = "sequence", record.seq_len, record.flops_per_s
        case CollectiveCurve():
            axis, sizes, readings = "bytes", record.message_bytes, record.seconds
        case _:
            raise TypeError(f"no summary for {type(record).__name__}")
    return f"{len(sizes)} points, {axis} {sizes[0]:g} to {sizes[-1]:g}: {readings[0]:.3g} to {readings[-1]:.3g}"
