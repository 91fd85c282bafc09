"""The plan nearest to one that does not fit: the same ranks, less kept on the device, as little slower as can be."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.legality import violations
from moeplan.plan import Plan
from moeplan.planner.request import MEMORY_MARGIN_FRAC
from moeplan.planner.space import absent_modules
from moeplan.point import Point
from moeplan.results import Figures
from moeplan.simulator.dynamic_cp import memory_point
from moeplan.simulator.memory import peak_memory_bytes
from moeplan.simulator.predict import predict, step_times
from moeplan.simulator.stack import SoftwareStack
from moeplan.vocabulary import OffloadModule, RecomputeModule

# What is sent together, by what it frees for the link's time: rows of the experts, then attention, then the rest.
_OFFLOADS: tuple[tuple[OffloadModule, ...], ...] = (
    (),
    ("expert_fc1", "moe_act"),
    ("core_attn", "attn_proj"),
    ("attn_proj", "core_attn", "expert_fc1", "moe_act"),
    ("attn_norm", "attn_proj", "core_attn", "expert_fc1", "mlp_norm", "moe_act", "qkv_linear"),
)


@dataclass(frozen=True, slots=True)
class NearestFit:
    """A plan that fits, with its prediction; ``changes`` are the fields that differ, as ``key old -> new``."""

    plan: Plan
    predicted: Figures
    changes: tuple[str, ...]


def nearest_fit(
    plan: Plan, profile: HardwareProfile, stack: SoftwareStack, *, used_bytes: float = 0.0
) -> NearestFit | None:
    """The fastest predicted plan of the same folding that fits, by smaller mbs, more recompute or offload.

    Weight gradients that wait in pairs are given up for it too. ``used_bytes``: what a run of ``plan`` needed at least;
    where that is above its prediction, predictions of others are scaled by the same factor. None where nothing fits.
    """
    base = _base(plan)
    own_bytes = peak_memory_bytes(plan.model, base, stack, profile)
    scale = max(1.0, used_bytes / own_bytes)
    usable = profile.memory_bytes.value * (1 - MEMORY_MARGIN_FRAC)
    fitting = [
        point
        for point in _candidates(plan, stack)
        if scale * peak_memory_bytes(plan.model, point, stack, profile) <= usable
    ]
    if not fitting:
        return None
    times = [time.step_s for time in step_times(plan.model, fitting, stack, profile)]
    best = fitting[min(range(len(fitting)), key=lambda index: (times[index], len(_changed(base, fitting[index]))))]
    changed = _changed(base, best)
    found = plan.replace(**changed, layout=plan.layout)
    changes = tuple(f"{key} {_text(getattr(plan, key))} -> {_text(new)}" for key, new in changed.items())
    return NearestFit(found, predict(found, profile, stack), changes)


def _base(plan: Plan) -> Point:
    """What memory is predicted of: under dynamic_cp full ranks, whatever the documents."""
    return memory_point(plan) if plan.dynamic_cp else plan.point


def _candidates(plan: Plan, stack: SoftwareStack) -> Iterator[Point]:
    """Legal points that keep at most as much, the plan itself left out."""
    base = _base(plan)
    offloads: list[dict[str, Any]] = [{}]
    if "offload_modules" in stack.features:
        offloads += [{"offload_modules": tuple(sorted({*plan.offload_modules, *modules}))} for modules in _OFFLOADS[1:]]
    if "offload_layers" in stack.features:
        num_layers = -(-plan.model.num_layers // plan.pp)
        offloads += [{"offload_layers": num} for num in range(plan.offload_layers + 1, num_layers)]
    if "offload_optimizer_states" in stack.features and not plan.offload_optimizer_states:
        offloads += [one | {"offload_optimizer_states": True} for one in offloads]
    sizes = [base.mbs // part for part in range(1, base.mbs + 1) if base.mbs % part == 0]
    pairings = dict.fromkeys((base.paired_wgrad, ()))
    for mbs, recompute, offload, paired in product(sizes, _recomputes(plan, stack), offloads, pairings):
        point = replace(base, mbs=mbs, recompute=recompute, paired_wgrad=paired, **offload)
        broken = any(violations(plan.model, point)) or any(stack.violations(plan.model, point))
        if point != base and not broken:
            yield point


def _recomputes(plan: Plan, stack: SoftwareStack) -> Iterator[tuple[RecomputeModule, ...]]:
    """The plan's modules with every set of further ones that can drop anything, and full recompute."""
    useless = {"full", *plan.recompute, *absent_modules(plan.model)}
    useless |= {"core_attn"} if stack.fused_attention else set()
    if "full" in plan.recompute:
        yield plan.recompute
        return
    further = [module for module in stack.recompute if module not in useless]
    for count in range(len(further) + 1):
        for added in combinations(further, count):
            yield tuple(sorted({*plan.recompute, *added}))
    if "full" in stack.recompute:
        yield ("full",)


def _changed(base: Point, point: Point) -> dict[str, Any]:
    return {key: new for key, new in point.as_dict().items() if new != getattr(base, key)}


def _text(value: object) -> str:
    return "+".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
