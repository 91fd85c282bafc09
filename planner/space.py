"""The space a search covers: candidate values per axis, and the legal points they make."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from math import gcd
from typing import Any

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.schema import DispatchBackend, HardwareProfile
from moeplan.layout import PipelineLayout, balanced_layout
from moeplan.legality import recompute_violations, violations
from moeplan.model_spec import MlaAttention, ModelSpec
from moeplan.plan import Plan
from moeplan.planner.request import SearchRequest
from moeplan.point import Point
from moeplan.simulator.rank_groups import block_size
from moeplan.simulator.stack import SoftwareStack
from moeplan.vocabulary import PrecisionName, RecomputeModule

MESH_AXES = ("tp", "cp", "pp", "etp", "ep")
# Report section 10.2: context parallelism from 8K tokens on, and no less than 4K tokens a rank.
MIN_SEQ_LEN_FOR_CP, MIN_TOKENS_PER_CP_RANK = 8192, 4096
# Wider tensor parallelism leaves GEMMs too narrow; none of 814 published runs has more virtual stages than 16.
# --fix reaches beyond these.
MAX_TP, MAX_MBS, MAX_VP = 8, 8, 16
# Modules whose recomputation is cheap for what it frees (report section 1.6), tried in every combination. ``full``
# repeats GEMMs and the expert exchange and is tried alone, last; before it all but attention, which costs most to
# repeat on long sequences (report section 6).
CHEAP_MODULES: tuple[RecomputeModule, ...] = ("layernorm", "moe_act", "mla_up_proj", "shared_experts")
ALL_BUT_ATTENTION: tuple[RecomputeModule, ...] = ("layernorm", "mla_up_proj", "mlp", "moe")
EXCLUDE_EP_OVERLAP: tuple[RecomputeModule, ...] = ("full", "moe")
RecomputeSet = tuple[RecomputeModule, ...]
# Plan fields that search takes from the stack's recipes.
STACK_FEATURES = (
    "cuda_graph",
    "ep_overlap",
    "delay_wgrad",
    "fused_grouped_mlp",
    "permute_fusion",
    "router_fusion",
    "tp_comm_overlap",
)


@dataclass(frozen=True, slots=True)
class Space:
    """Candidate values of each searched axis."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    vp: tuple[int, ...] | None  # None: by rule from the model and pp
    etp: tuple[int, ...] | None  # None: 1 and tp
    ep: tuple[int, ...]
    mbs: tuple[int, ...]
    precision: tuple[str, ...]
    dispatcher: tuple[str, ...]
    recompute: tuple[RecomputeSet, ...]


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


def default_space(request: SearchRequest) -> Space:
    """Every axis as far as the stack executes it and the report's rules find it worth while, then ``--fix``."""
    model, stack, gpus = request.model, request.stack, request.num_gpus
    domain = int(request.profile.scale_up_domain_gpus.value)
    max_cp = request.seq_len // MIN_TOKENS_PER_CP_RANK if request.seq_len >= MIN_SEQ_LEN_FOR_CP else 1
    experts = model.moe.num_experts if model.moe else 1
    fixed = request.fixed
    return Space(
        tp=_pinned(fixed, "tp") or powers_of_two(min(MAX_TP, domain, gpus, model.attention.num_heads)),
        cp=_pinned(fixed, "cp") or powers_of_two(min(max_cp, stack.max_cp or gpus, gpus)),
        pp=_pinned(fixed, "pp") or divisors(gpus, min(model.num_layers + 1, stack.max_pp or gpus)),
        vp=_pinned(fixed, "vp") or ((1,) if stack.max_vp == 1 else None),
        etp=_pinned(fixed, "etp") or (None if model.moe else (1,)),
        ep=_pinned(fixed, "ep") or tuple(value for value in divisors(experts, gpus) if gpus % value == 0),
        mbs=_pinned(fixed, "mbs") or powers_of_two(MAX_MBS),
        precision=_pinned(fixed, "precision") or precisions_of(stack, request.profile),
        dispatcher=_dispatchers(request),
        recompute=_pinned(fixed, "recompute") or recompute_sets(model, stack),
    )


def _pinned(fixed: dict[str, Any], key: str) -> tuple[Any, ...]:
    return (fixed[key],) if key in fixed else ()


def precisions_of(stack: SoftwareStack, profile: HardwareProfile) -> tuple[PrecisionName, ...]:
    """Recipes that both the stack and the device execute."""
    native = "fp32" if profile.device == "cpu" else "bf16"
    usable = tuple(name for name in stack.precisions if name in (native, *profile.low_precision))
    if not usable:
        raise InvalidInputError(
            f"stack {stack.name} runs {', '.join(stack.precisions)}; {profile.name} runs "
            f"{', '.join((native, *profile.low_precision))}",
            "choose another --stack or --hardware",
        )
    return usable


def _dispatchers(request: SearchRequest) -> tuple[str, ...]:
    """Back ends to try: those of the stack for which the profile has a rate, as far as ``--fix`` leaves them."""
    rated = {rate.backend for rate in request.profile.dispatch} | {
        "alltoall",
        "allgather",
        "torch",
    }  # those of collectives
    optional = request.stack.optional_dispatchers if "flex_backend" in request.fixed else ()
    known = tuple(name for name in (*request.stack.dispatchers, *optional) if name in rated)
    if request.model.moe is None:
        return ("alltoall",)  # no expert exchange: the field has no effect
    wanted = tuple(
        name
        for name in known
        if all(request.fixed.get(key, value) == value for key, value in dispatch_fields(name).items())
    )
    if not wanted:
        pins = ", ".join(
            f"{key}={request.fixed[key]}" for key in ("dispatcher", "flex_backend") if key in request.fixed
        )
        raise InvalidInputError(
            f"--fix {pins}: stack {request.stack.name} on {request.profile.name} has "
            f"{', '.join(known) or 'no MoE layer'}",
            "choose one of those, or another --stack",
        )
    return wanted


def divisors(number: int, limit: int) -> tuple[int, ...]:
    """Divisors of ``number`` up to ``limit``, ascending."""
    return tuple(value for value in range(1, min(number, limit) + 1) if number % value == 0)


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to ``limit`` (at least 1)."""
    return tuple(2**exponent for exponent in range(max(limit, 1).bit_length()))


def recompute_sets(model: ModelSpec, stack: SoftwareStack) -> tuple[RecomputeSet, ...]:
    """Sets of modules to recompute, smaller first, as far as the stack executes them and the model has them."""
    absent = {
        "mla_up_proj": not isinstance(model.attention, MlaAttention),
        "shared_experts": model.moe is None or not model.moe.shared_ffn_size,
        "moe_act": model.moe is None,
        "moe": model.moe is None,
        "mlp": "dense" not in model.layer_kinds,
    }
    usable = [module for module in CHEAP_MODULES if module in stack.recompute and not absent.get(module)]
    sets: list[RecomputeSet] = [
        tuple(sorted(chosen)) for size in range(len(usable) + 1) for chosen in combinations(usable, size)
    ]
    sets.append(tuple(module for module in ALL_BUT_ATTENTION if module in stack.recompute and not absent.get(module)))
    sets = list(dict.fromkeys(sets))
    return (*sets, ("full",)) if "full" in stack.recompute else tuple(sets)


def vp_values(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """For each size of the largest stage, the fewest virtual stages that reach it: more would only add sends."""
    if pp == 1:
        return (1,)
    values: dict[int, int] = {}
    for vp in range(1, min(MAX_VP, (model.num_layers + 1) // pp) + 1):
        values.setdefault(-(-model.num_layers // (pp * vp)), vp)
    return tuple(values.values()) or (1,)


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
                for kind, precision, dispatcher in product(kinds, space.precision, space.dispatcher):
                    chosen = degrees | kind | {"vp": vp, "precision": precision} | dispatch_fields(dispatcher)
                    yield list(_legal(request, space, chosen, tally))


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


def dispatch_fields(backend: str) -> dict[str, Any]:
    """Plan fields that choose an exchange back end."""
    if backend in {"alltoall", "allgather"}:
        return {"dispatcher": backend}
    return {"dispatcher": "flex", "flex_backend": backend}


def _legal(request: SearchRequest, space: Space, chosen: dict[str, Any], tally: Tally) -> Iterator[Family]:
    base = make_point(request, chosen | {"mbs": space.mbs[0]})
    recompute, why_none = _legal_recompute(request, space.recompute, base)  # the same for every mbs
    for mbs in space.mbs:
        point = make_point(request, chosen | {"mbs": mbs})
        problem = next(_problems(request, point), why_none)
        if problem is not None:
            tally.add(*problem)
            continue
        try:
            layout = _layout(request.model, point)
        except InvalidInputError as error:  # a pinned one is of one number of stages
            tally.add("layout", error.message)
            continue
        fields = point.as_dict() | {"layout": layout}
        yield Family(Point(**fields), recompute)


def _problems(request: SearchRequest, point: Point) -> Iterator[tuple[str, str]]:
    """Why a point that recomputes nothing is no candidate."""
    for key, values in request.forbidden.items():
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
    defaults = {name: field.default for name, field in Plan.model_fields.items() if name in Point.__slots__}
    sizes = {
        "num_gpus": request.num_gpus,
        "seq_len": request.seq_len,
        "global_batch_size": request.global_batch_size,
    }
    wide = {"grad_dtype": "fp64", "moment_dtype": "fp64"} if chosen.get("precision") == "fp64" else {}
    set_by_stack: dict[str, Any] = {}
    if "precision" in chosen:
        set_by_stack = stack_features(request.stack, request.model, request.profile, request.fixed | chosen)
    return Point(**(defaults | set_by_stack | sizes | wide | request.fixed | chosen | {"recompute": ()}))


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
