"""From a row of a table of reported cases (out of memory, fits, refused, so fast) to a plan, by rules for every row.

Unstated cells take the defaults of the row's stack. What cannot be expressed raises CellError; a plan that breaks a
rule raises InvalidInputError, which for a case is an answer.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

from moeplan.errors import InvalidInputError
from moeplan.files import short, validate
from moeplan.hwprofiles.load import profile_names
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.planner.published_names import find_stack
from moeplan.planner.published_rows import CellError, PublishedRow
from moeplan.presets import load_model
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.stack_defaults import Features
from moeplan.vocabulary import PARTIAL_GRAPH, PRECISIONS, CudaGraphScope

LATEST = "megatron-bridge-26.08"
# Engines by what their sources are called, first match wins; all else is Megatron.
ENGINES = (
    ("simumax", "simumax-2026"),
    ("automodel", "automodel-25.10"),
    ("torchtitan#4794", "torchtitan-2026.08"),
    ("titan", "torchtitan-2025.06"),
    ("2603.07685", "megatron-lm-2026.03"),
    ("modelzoo best_practice", "megatron-lm-2026.05"),
)
# torchtitan's 16B configuration has that model's sizes; Nemotron 3 is written with another hyphen, Ultra without sizes.
ALIASES = {
    "deepseek-v3-16b": "deepseek-v2-lite",
    "nemotron-3-nano-30b-a3b": "nemotron3-nano-30b-a3b",
    "nemotron-3-super-120b-a12b": "nemotron3-super-120b-a12b",
    "nemotron-3-ultra": "nemotron3-ultra-550b-a55b",
}
PRECISION_NAMES = {"fp8": "fp8_current", "fp8 blockwise": "fp8_blockwise"}
# Where a row names no model: legality depends on the sizes it states alone, the rest comes from these.
STAND_INS = {"dense": "llama3-8b", "moe": "qwen3-30b-a3b"}
# Where a row on a rule names no GPU, or one without a profile, one that runs the recipe: such rules do not depend on
# it, unless they speak of a dispatcher.
ANY_GPU = {"mxfp8": "b200", "nvfp4": "b200"}


@dataclass(frozen=True, slots=True)
class CaseSetting:
    """What a case runs on and what beside the plan its verdict depends on."""

    model: ModelSpec
    hardware: str
    stack: str
    is_stand_in: bool
    memory_frac: float = 1.0  # of the device, where something else holds the rest
    has_expandable_segments: bool = True
    is_between_hosts: bool = False

    def machine(self, profile: HardwareProfile, num_gpus: int) -> HardwareProfile:
        """The profile, in hosts of half the GPUs where the case says that there are several."""
        if not self.is_between_hosts or num_gpus > profile.scale_up_domain_gpus.value:
            return profile
        domain = profile.scale_up_domain_gpus.model_copy(update={"value": max(1, num_gpus // 2)})
        return profile.model_copy(update={"scale_up_domain_gpus": domain})


def setting_of(row: PublishedRow) -> CaseSetting:
    """Model, machine and stack of a case. Raises CellError."""
    model, is_stand_in = _model(row)
    notes = row.text("optimizer/sharding")
    reserved = re.search(r"\breserves (\d{1,2})%", notes)
    return CaseSetting(
        model=model,
        hardware=_hardware(row),
        stack=_stack_name(row),
        is_stand_in=is_stand_in,
        memory_frac=1 - int(reserved[1]) / 100 if reserved else 1.0,
        has_expandable_segments="no allocator env" not in notes,
        is_between_hosts="internode" in row.text("expected"),
    )


def plan_of_case(row: PublishedRow, setting: CaseSetting, stack: SoftwareStack, profile: HardwareProfile) -> Plan:
    """The plan of a case. Raises CellError where it cannot be expressed, InvalidInputError where a rule forbids it."""
    precision: Any = _precision(row)
    sizes = _sizes(row)
    backend = _backend(row)
    features = stack.features_of(setting.model, profile, precision, backend)
    backend = backend or features.backend
    features = stack.features_of(setting.model, profile, precision, backend)
    fields: dict[str, Any] = {
        "model": setting.model,
        "hardware": profile.name,
        "stack": stack.name,
        "precision": precision,
        **sizes,
        "layout": _layout(row, setting, sizes),
        "recompute": _recompute(row, features),
        **_sharding(row, features, stack, precision),
        "sequence_parallel": "without sequence_parallel" not in row.text("expected"),
    }
    if setting.model.moe is not None:
        if not row.text("ep"):
            raise CellError("ep", f"not stated, and {setting.model.name} has experts")
        fields |= _moe_fields(row, features, backend or "alltoall", sizes, setting.model)
    return validate(Plan, fields, "plan")


def _stack_name(row: PublishedRow) -> str:
    named = f"{row.text('source')} {row.text('model')}".lower()
    release = re.search(r"release (\d+\.\d+)", row.text("expected"))
    if release:
        return find_stack(f"megatron-bridge-{release[1]}")
    for word, stack in ENGINES:
        if word in named:
            return find_stack(stack)
    return LATEST


def _hardware(row: PublishedRow) -> str:
    written = row.text("gpu")
    if not written:
        return ANY_GPU.get(_precision(row), "h100")
    name = re.sub(r"-\d+GB$", "", written).lower()
    if name not in profile_names() and row.id.startswith("C") and not row.text("dispatcher"):
        return ANY_GPU.get(_precision(row), "h100")
    if name not in profile_names():
        raise CellError("gpu", f"no hardware profile of {short(written)}, allowed: {', '.join(profile_names())}")
    return name


def _precision(row: PublishedRow) -> str:
    written = row.text("precision")
    name = PRECISION_NAMES.get(written, written)
    if name not in PRECISIONS:
        raise CellError("precision", f"got {short(written)}, allowed: {', '.join(PRECISIONS)}")
    return name


def _model(row: PublishedRow) -> tuple[ModelSpec, bool]:
    written = row.text("model")
    name = re.sub(r"\s*\(.*\)| (671B|1T)$", "", re.sub(r"\s*\(.*\)", "", written)).strip().lower()
    layers = re.search(r" (\d+) layers$", name)
    name = name.removesuffix(layers[0] if layers else "")
    changes: dict[str, int] = {"num_layers": int(layers[1])} if layers else {}
    if layers:
        changes |= {"num_mtp_layers": 0, "num_dense_layers": 1}  # as published layer-cut runs have it
    if "no MTP" in written:
        changes |= {"num_mtp_layers": 0, "mtp_shared": False}
    try:
        stand_in = _stand_in(written)
        if stand_in is not None:
            return stand_in, True
        return _changed(ALIASES.get(name, name), tuple(changes.items())), False
    except InvalidInputError as error:
        raise CellError("model", error.message) from None


def _stand_in(written: str) -> ModelSpec | None:
    """A model of the sizes a name states, or None for a name that is a model's."""
    layers = re.fullmatch(r"(\d+)-layer", written)
    if layers:
        return _changed(STAND_INS["dense"], (("num_layers", int(layers[1])),))
    match = re.fullmatch(r"MoE(?: (\d+) experts| hidden (\d+))?(?: \(.*\))?", written)
    if match is None:
        return None
    model = load_model(STAND_INS["moe"])
    fields = model.model_dump()
    if match[1]:
        fields["moe"]["num_experts"] = int(match[1])
    if match[2]:
        fields["hidden_size"] = int(match[2])
    return validate(ModelSpec, fields, written)


@lru_cache(maxsize=64)
def _changed(name: str, changes: tuple[tuple[str, int], ...]) -> ModelSpec:
    model = load_model(name)
    return validate(ModelSpec, model.model_dump() | dict(changes), name) if changes else model


def _sizes(row: PublishedRow) -> dict[str, int]:
    """Degrees and batch. No GPU count: the fewest; no batch: enough micro-batches to fill the pipeline four times."""
    sizes = {name: row.count(name, 1) for name in ("mbs", "tp", "pp", "vp", "cp", "ep", "etp")}
    stage = math.lcm(sizes["tp"] * sizes["cp"], sizes["etp"] * sizes["ep"])
    sizes["num_gpus"] = row.count("n_gpus", stage * sizes["pp"])
    sizes["seq_len"] = row.count("seq", 4096)
    dp = max(1, sizes["num_gpus"] // (sizes["tp"] * sizes["cp"] * sizes["pp"]))
    sizes["global_batch_size"] = row.count("gbs", sizes["mbs"] * dp * 4 * sizes["pp"])
    return sizes


def _layout(row: PublishedRow, setting: CaseSetting, sizes: dict[str, int]) -> str:
    """Empty: balanced. A stated last stage, or a stand-in of so many layers: whole layers a stage, what is over lost.

    That is what engines build from counts alone, so a layout that loses layers is refused for it.
    """
    num_layers, num_stages = setting.model.num_layers, sizes["pp"] * sizes["vp"]
    stated = re.search(r"last(?:-stage layers |=)(\d{1,3})\b", f"{row.text('reported_value')} {row.text('expected')}")
    offload_rows = re.search(r"last stage (\d{1,3}) layers", row.text("expected"))
    found = stated or offload_rows
    last = int(found[1]) if found else num_layers // num_stages
    is_balanced = found is None and not (setting.is_stand_in and setting.model.moe is None)
    if is_balanced or num_stages > num_layers + 2:  # the latter is refused for its own reason
        return ""
    others = (num_layers - last) // (num_stages - 1) if num_stages > 1 else 0
    stages = ["t" * others] * (num_stages - 1) + ["t" * last + "m" * setting.model.num_mtp_layers]
    return "E" + "|".join(stages) + "L"


def _recompute(row: PublishedRow, features: Features) -> tuple[str, ...]:
    written = row.text("recompute").removesuffix(" (as named)")
    if written in ("", "recipe"):
        return features.recompute or ()
    if written == "none":
        return ()
    if written.startswith("full"):
        return ("full",)
    return tuple(written.split(","))


def _backend(row: PublishedRow) -> Any:
    """The dispatcher a cell names; None for the recipe's, or none."""
    written = row.text("dispatcher")
    if "capacity" in written and not written.endswith("capacity 1"):
        raise CellError("dispatcher", f"got {short(written)}, only capacity 1 is predicted")
    for backend in ("alltoall", "deepep", "hybridep"):
        if written.startswith(backend):
            return backend
    return "alltoall" if written == "none" else None


def _sharding(row: PublishedRow, features: Features, stack: SoftwareStack, precision: str) -> dict[str, Any]:
    notes = row.text("optimizer/sharding")
    for word in ("LoRA", "SFT", "Muon"):
        if word in notes:
            raise CellError("optimizer/sharding", f"got {short(notes)}, only pre-training with Adam is predicted")
    is_full = "FSDP" in notes and stack.name.startswith(("torchtitan", "automodel", "megatron", "nemo"))
    on_host = re.search(r"offload (\d+)%", notes)
    frac = int(on_host[1]) / 100 if on_host else 0.0
    low = PRECISIONS[precision].quantized_bytes is not None  # type: ignore[index] # checked by _precision
    primary = "fp4 param gather" in notes or bool(features.fp8_primary_weights)
    bf16_gradients = stack.name.startswith("megatron-bridge") and "fp32 grads" not in notes
    return {
        "sharding": "full" if is_full else "optimizer",
        "optimizer_cpu_frac": frac,
        "fp8_primary_weights": primary and low and not frac and "fp8_primary_weights" in stack.features,
        "grad_dtype": "bf16" if bf16_gradients else "fp32",
        "moment_dtype": features.moment_dtype or "fp32",
        **features.kept_wide(is_low=low),
    }


def _moe_fields(
    row: PublishedRow, features: Features, backend: str, sizes: dict[str, int], model: ModelSpec
) -> dict[str, Any]:
    written, notes, expected = row.text("dispatcher"), row.text("optimizer/sharding"), row.text("expected")
    asked = "EP overlap" in written
    is_open = written in ("", "recipe") or written.startswith("recipe ")
    can_overlap = sizes["ep"] > 1 and (sizes["pp"] == 1 or sizes["vp"] > 1) and "FSDP" not in notes
    can_overlap = can_overlap and model.num_mtp_layers <= 1
    graphs: tuple[str, ...] = features.cuda_graph or ()
    if not is_open:
        stated_full = "full_iteration" in graphs and backend == "hybridep"
        graphs = _stated_graphs(notes) if "TE graphs" in notes else (graphs if stated_full else ())
    routing = "natural" if "natural" in expected else "balanced"
    overlap = asked or (is_open and can_overlap and bool(features.ep_overlap))
    return {
        "dispatcher": "alltoall" if backend == "alltoall" else "flex",
        **({} if backend == "alltoall" else {"flex_backend": backend}),
        "ep_overlap": overlap,
        "cuda_graph": graphs,
        "routing": "drop" if written.endswith("capacity 1") else routing,
        "permute_fusion": features.permute_fusion is not False,
        "router_fusion": features.router_fusion is not False,
    }


def _stated_graphs(notes: str) -> tuple[str, ...]:
    """What the graphs of a note hold: what it names after them, or what recipes capture."""
    named = re.search(r"TE graphs ([a-z_]+(?:\+[a-z_]+)*)", notes)
    scopes = tuple(scope for scope in named[1].split("+") if scope in get_args(CudaGraphScope)) if named else ()
    return scopes or PARTIAL_GRAPH
