"""What would make a plan fit that does not: settings that search leaves as they are, and what each of them leaves."""

from dataclasses import dataclass, replace
from typing import Any

from moeplan.legality import violations
from moeplan.planner.request import SearchRequest
from moeplan.point import Point
from moeplan.simulator.memory import peak_memory_bytes

# From what costs least to what costs most: main weights as what bf16 ones lack, moments in half the bytes, optimizer
# steps on the host, weights gathered for every use; then those that go together. Report sections 1.2 and 1.6.
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"main_weight_remainders": True},
    {"moment_dtype": "bf16"},
    {"optimizer_cpu_frac": 1.0},
    {"sharding": "full"},
    {"moment_dtype": "bf16", "grad_dtype": "bf16"},
    {"sharding": "full", "moment_dtype": "bf16"},
)


@dataclass(frozen=True, slots=True)
class Relief:
    """Pins for ``--fix`` that a search may be repeated with, and what its nearest miss then needs."""

    pins: str
    needed_bytes: float


def reliefs(request: SearchRequest, point: Point) -> tuple[Relief, ...]:
    """Settings that are not pinned, are legal and lower the memory of ``point``, in the order above."""
    own = peak_memory_bytes(request.model, point, request.stack, request.profile)
    found = []
    for fields in _SETTINGS:
        changed = replace(point, **fields)
        illegal = any(violations(request.model, changed)) or any(request.stack.violations(request.model, changed))
        if illegal or not request.fixed.keys().isdisjoint(fields):
            continue
        needed = peak_memory_bytes(request.model, changed, request.stack, request.profile)
        if needed < own:
            found.append(Relief(",".join(f"{key}={str(value).lower()}" for key, value in fields.items()), needed))
    return tuple(found)
