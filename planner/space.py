"""The space a search covers: candidate values per axis. The legal points they make are in families.py."""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.mixers import MlaAttention
from moeplan.model_spec import ModelSpec
from moeplan.planner.request import SearchRequest
from moeplan.simulator.stack import SoftwareStack
from moeplan.vocabulary import PrecisionName, RecomputeModule

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
RecomputeSet = tuple[RecomputeModule, ...]


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
    absent = absent_modules(model)
    usable = [module for module in CHEAP_MODULES if module in stack.recompute and module not in absent]
    sets: list[RecomputeSet] = [
        tuple(sorted(chosen)) for size in range(len(usable) + 1) for chosen in combinations(usable, size)
    ]
    sets.append(tuple(module for module in ALL_BUT_ATTENTION if module in stack.recompute and module not in absent))
    sets = list(dict.fromkeys(sets))
    return (*sets, ("full",)) if "full" in stack.recompute else tuple(sets)


def absent_modules(model: ModelSpec) -> frozenset[RecomputeModule]:
    """Modules that no layer of the model has, so that recomputing them drops nothing."""
    absent: set[RecomputeModule] = set() if isinstance(model.attention, MlaAttention) else {"mla_up_proj"}
    absent |= {"moe", "moe_act"} if model.moe is None else set()
    absent |= {"shared_experts"} if model.moe is None or not model.moe.shared_ffn_size else set()
    absent |= {"mlp"} if not model.has_dense_mlp else set()
    return frozenset(absent)


def vp_values(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """For each size of the largest stage, the fewest virtual stages that reach it: more would only add sends."""
    if pp == 1:
        return (1,)
    values: dict[int, int] = {}
    for vp in range(1, min(MAX_VP, (model.num_layers + 1) // pp) + 1):
        values.setdefault(-(-model.num_layers // (pp * vp)), vp)
    return tuple(values.values()) or (1,)


def dispatch_fields(backend: str) -> dict[str, Any]:
    """Plan fields that choose an exchange back end."""
    if backend in {"alltoall", "allgather"}:
        return {"dispatcher": backend}
    return {"dispatcher": "flex", "flex_backend": backend}
