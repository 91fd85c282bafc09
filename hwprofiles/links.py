"""A profile that changes its base's link changes what was read over that link, unless it brings readings of its own."""

from collections.abc import Callable
from typing import Any

# By tier: the field of the link's rate, and what divides it (several hosts share the switches above their leaf).
LINKS = {
    "network": ("network_bytes_per_s_per_dir_per_gpu", "network_oversubscription"),
    "scale_up": ("scale_up_bytes_per_s_per_dir_per_gpu", None),
}
MIN_ERROR_FRAC = 0.3


def scale_inherited(base: dict[str, Any], child: dict[str, Any], merged: dict[str, Any]) -> None:
    """Scale collectives and dispatch rates that ``merged`` has from ``base`` to the links that ``child`` states.

    seconds = the latency of the smallest message + what is above it over the ratio of the rates. Malformed tables are
    left for the schema to refuse.
    """
    for tier, (rate_key, shared_key) in LINKS.items():
        if rate_key not in child and shared_key not in child:
            continue
        rates = [_rate(table, rate_key, shared_key) for table in (base, merged)]
        if None in rates or rates[0] == rates[1]:
            continue
        ratio = float(rates[1] or 0) / float(rates[0] or 1)
        for field, scale in (("collectives", _scaled_curve), ("dispatch", _scaled_dispatch)):
            own = child.get(field, [])
            merged[field] = [
                entry if entry.get("tier") != tier or entry in own else _scaled(entry, ratio, scale)
                for entry in merged.get(field, [])
            ]


def _scaled(
    entry: dict[str, Any], ratio: float, scale: Callable[[dict[str, Any], float], dict[str, Any]]
) -> dict[str, Any]:
    try:
        return scale(entry, ratio)
    except (KeyError, TypeError, ValueError, AttributeError):
        return entry


def _rate(table: dict[str, Any], rate_key: str, shared_key: str | None) -> float | None:
    rate, shared = table.get(rate_key), table.get(shared_key or "", {"value": 1.0})
    values = [part.get("value") if isinstance(part, dict) else None for part in (rate, shared)]
    if not all(isinstance(value, int | float) and value > 0 for value in values):
        return None
    return float(values[0]) / float(values[1])  # type: ignore[arg-type]


def _scaled_curve(entry: dict[str, Any], ratio: float) -> dict[str, Any]:
    seconds = entry["seconds"]
    latency_s = min(seconds)
    return _assumed(entry, ratio) | {"seconds": [latency_s + (value - latency_s) / ratio for value in seconds]}


def _scaled_dispatch(entry: dict[str, Any], ratio: float) -> dict[str, Any]:
    rate = entry["bytes_per_s_per_gpu"]
    return entry | {"bytes_per_s_per_gpu": _assumed(rate, ratio) | {"value": rate["value"] * ratio}}


def _assumed(entry: dict[str, Any], ratio: float) -> dict[str, Any]:
    error_frac = max(MIN_ERROR_FRAC, entry.get("error_frac") or 0.0)
    rule = f"rule: the base's, its link at {ratio:.3g} times the rate ({entry['ref']})"
    kept = {key: value for key, value in entry.items() if key not in ("low", "high")}
    return kept | {"source": "assumed", "ref": rule, "error_frac": error_frac}
