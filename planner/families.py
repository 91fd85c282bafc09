"""The legal points that candidate values make, in families that differ in recompute only."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd
from typing import Any

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.schema import DispatchBackend, HardwareProfile
from moeplan.layout import PipelineLayout, balanced_layout
from moeplan.legality import recompute_violations, violations
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.planner.request import SearchRequest
from moeplan.planner.space import RecomputeSet, Space, dispatch_fields, divisors, vp_values
from moeplan.point import Point
from moeplan.simulator.rank_groups import block_size
from moeplan.simulator.stack import SoftwareStack
from moeplan.vocabulary import RecomputeModule

_DEFAULTS = {name: field.default for name, field in Plan.model_fields.items() if name in Point.__slots__}
MESH_AXES = ("tp", "cp", "pp", "etp", "ep")
EXCLUDE_EP_OVERLAP: tuple[RecomputeModule, ...] = ("full", "moe")
# Plan fields that search takes from the stack's recipes.
STACK_FEATURES = (
    "cuda_graph",
    "ep_overlap",
    "delay_wgrad",
    "fused_grouped_mlp",
    "permute_fusion",
    "router_fusion",
    "tp_comm_overlap",
    "bf16_last_layers",
    "bf16_modules",
)


@dataclass(slots=True)
class Tally:
    """Candidates left out before costing, by the key of the first rule they break, with one example each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, message: str) -> None:
        """Count one candidate."""
        self.counts[key] += 1
        self.examples.setdefault(key, message)


@dataclass(frozen=True, slots=True)
class Family:
    """Legal points that differ in recompute only, cheaper sets first. ``base`` recomputes nothing."""

    base: Point
    recompute: tuple[RecomputeSet, ...]

    def points(self) -> Iterator[Point]:
        """The points, in order."""
        for chosen in self.recompute:
            yield self._with(chosen)

    @property
    def lightest(self) -> Point:
        """The point that recomputes most."""
        return self._with(self.recompute[-1])

    def _with(self, chosen: RecomputeSet) -> Point:
        """The base with ``chosen`` recomputed; overlap of exchanges ends where a module excludes it."""
        changes: dict[str, Any] = {"recompute": chosen}
        if self.base.ep_overlap and not set(chosen).isdisjoint(EXCLUDE_EP_OVERLAP):
            changes |= {"ep_overlap": False, "delay_wgrad": False}
        return Point(**(self.base.as_dict() | changes))


def families(request: SearchRequest, space: Space, tally: Tally) -> Iterator[list[Family]]:
    """Legal families in lists of rising micro-batch size; the rest is counted in ``tally``.

    Within a list everything but mbs is equal, so that a search may stop at the first mbs that cannot fit.
    """
    for tp, cp, pp, ep in product(space.tp, space.cp, space.pp, space.ep):
        for etp in space.etp or sorted({1, tp}):
            degrees = dict(zip(MESH_AXES, (tp, cp, pp, etp, ep), strict=True))
            problem = _mesh_problem(request.num_gpus, degrees)
            if problem:
                tally.add("mesh", problem)
                continue
            kinds = cp_kinds(request, tp, cp)
            for vp in space.vp or vp_values(request.model, pp):
                for kind, precision in product(kinds, space.precision):
                    fields = degrees | kind | {"vp": vp, "precision": precision}
                    for dispatcher in _dispatchers(request, space, fields):
                        yield list(_legal(request, space, fields | dispatcher, tally))


def _dispatchers(request: SearchRequest, space: Space, chosen: dict[str, Any]) -> list[dict[str, Any]]:
    """Plan fields of each dispatcher to try: where experts are not split, only those that change something else."""
    fields = [dispatch_fields(name) for name in space.dispatcher]
    if chosen["ep"] * chosen["etp"] > 1:
        return fields
    allowed = [one for one in fields if not any(one.get(key) in values for key, values in request.forbidden.items())]
    kept: dict[str, dict[str, Any]] = {}
    for one in allowed or fields:
        set_by_stack = stack_features(request.stack, request.model, request.profile, request.fixed | chosen | one)
        kept.setdefault(repr(set_by_stack), one)
    return list(kept.values())


def cp_kinds(request: SearchRequest, tp: int, cp: int) -> list[dict[str, Any]]:
    """Plan fields of the kinds of context parallelism to try: the default, or what ``--fix`` says.

    Where a ring would leave the scale-up domain, also heads split inside it: all ranks that fit and divide the heads
    (report section 6: a2a and tp inside a node, p2p across).
    """
    attention = request.model.attention
    inside = block_size(request.num_gpus, int(request.profile.scale_up_domain_gpus.value)) // tp
    if inside >= cp or "cp_comm" in request.fixed or "a2a+p2p" not in request.stack.cp_comm:
        return [{}]
    shared = gcd(cp, attention.num_heads // tp, attention.num_kv_heads // tp)
    size = max(divisors(shared, inside), default=1)
    return [{}, {"cp_comm": "a2a+p2p", "cp_a2a_size": size}] if size > 1 else [{}]


def _mesh_problem(num_gpus: int, degrees: dict[str, int]) -> str:
    for axes in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
        size = 1
        for axis in axes:
            size *= degrees[axis]
        if num_gpus % size:
            return f"{' x '.join(f'{axis} {degrees[axis]}' for axis in axes)} = {size} does not divide {num_gpus} GPUs"
    return ""


def _legal(request: SearchRequest, space: Space, chosen: dict[str, Any], tally: Tally) -> Iterator[Family]:
    base = make_point(request, chosen | {"mbs": space.mbs[0]})
    recompute, why_none = _legal_recompute(request, space.recompute, base)  # the same for every mbs
    is_laid_out = False
    for mbs in space.mbs:
        point = base if mbs == base.mbs else replace(base, mbs=mbs)
        problem = next(_problems(request, point), why_none)
        if problem is None and not is_laid_out:
            try:
                base = replace(base, layout=_layout(request.model, base))
            except InvalidInputError as error:  # a pinned one is of one number of stages
                problem = "layout", error.message
            else:
                is_laid_out, point = True, replace(base, mbs=mbs)
        if problem is not None:
            tally.add(*problem)
            continue
        yield Family(point, recompute)


def _problems(request: SearchRequest, point: Point) -> Iterator[tuple[str, str]]:
    """Why a point that recomputes nothing is no candidate."""
    for key, values in request.forbidden.items():
        if key == "flex_backend" and point.dispatcher != "flex":
            continue  # the field has no effect
        if key != "recompute" and getattr(point, key) in values:
            yield "forbidden", f"--forbid {key}"
    yield from violations(request.model, point)
    yield from request.stack.violations(request.model, point)
    yield from request.stack.failures(request.model, point, request.profile)


def _legal_recompute(
    request: SearchRequest, sets: tuple[RecomputeSet, ...], base: Point
) -> tuple[tuple[RecomputeSet, ...], tuple[str, str] | None]:
    """The sets of modules that go with the point, and where there is none, why the first does not."""
    problems = [next(_recompute_problems(request, base, chosen), None) for chosen in sets]
    legal = tuple(chosen for chosen, problem in zip(sets, problems, strict=True) if problem is None)
    return legal, None if legal else problems[0]


def _recompute_problems(request: SearchRequest, base: Point, chosen: RecomputeSet) -> Iterator[tuple[str, str]]:
    """``--forbid recompute=a+b`` rules out every set that holds both, ``none`` the empty one."""
    modules = set(chosen)
    for barred in request.forbidden.get("recompute", ()):
        if modules.issuperset(barred) if barred else not chosen:
            yield "forbidden", "--forbid recompute"
    yield from recompute_violations(request.model, base, chosen)
    yield from request.stack.recompute_violations(chosen)
    if request.fixed.get("ep_overlap") and not modules.isdisjoint(EXCLUDE_EP_OVERLAP):
        yield "ep_overlap", f"excludes recompute of {', '.join(chosen)}"


def _layout(model: ModelSpec, point: Point) -> str:
    num_stages = point.pp * point.vp
    if not point.layout:
        return balanced_layout(model, num_stages).text
    layout = PipelineLayout.from_string(point.layout)
    layout.check(model, num_stages)
    return layout.text


def make_point(request: SearchRequest, chosen: dict[str, Any]) -> Point:
    """A point with ``chosen`` fields, then the request's pins, what the stack's recipes set, and Plan's defaults."""
    sizes = {
        "num_gpus": request.num_gpus,
        "seq_len": request.seq_len,
        "global_batch_size": request.global_batch_size,
    }
    wide = {"grad_dtype": "fp64", "moment_dtype": "fp64"} if chosen.get("precision") == "fp64" else {}
    set_by_stack: dict[str, Any] = {}
    if "precision" in chosen:
        set_by_stack = stack_features(request.stack, request.model, request.profile, request.fixed | chosen)
    return Point(**(_DEFAULTS | set_by_stack | sizes | wide | request.fixed | chosen | {"recompute": ()}))


def stack_features(
    stack: SoftwareStack, model: ModelSpec, profile: HardwareProfile, chosen: dict[str, Any]
) -> dict[str, Any]:
    """Overlap, graphs and fusions that the stack's recipes switch on, as far as the degrees in ``chosen`` allow."""
    backend: DispatchBackend = chosen["flex_backend"] if chosen["dispatcher"] == "flex" else chosen["dispatcher"]
    found = stack.features_of(model, profile, chosen["precision"], backend)
    stated = {name: Plan.model_fields[name].default for name in STACK_FEATURES}
    stated |= {name: getattr(found, name) for name in STACK_FEATURES if getattr(found, name) is not None}
    if chosen["ep"] == 1 or (chosen["pp"] > 1 and chosen["vp"] == 1):
        stated |= {"ep_overlap": False, "delay_wgrad": False}
    if chosen["tp"] == 1:
        stated["tp_comm_overlap"] = False
    return stated
