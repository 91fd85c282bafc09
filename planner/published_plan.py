"""From a row of a table of measured runs to a plan, by rules that hold for every row.

An empty cell is unknown: the default of the row's stack is used, never the value of a similar row. What cannot be
expressed raises CellError, with the column and the reason.
"""

import re
from functools import lru_cache
from typing import Any, get_args

from moeplan.errors import InvalidInputError
from moeplan.files import short, validate
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.layout import PipelineLayout, balanced_layout
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.planner.published_names import backend_name, parts_of, precision_name, routing_name
from moeplan.planner.published_rows import CellError, PublishedRow
from moeplan.presets import load_model
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.stack_defaults import Features
from moeplan.vocabulary import PARTIAL_GRAPH, PRECISIONS, CudaGraphScope, OffloadModule, RecomputeModule

GRAPH_SCOPES: tuple[str, ...] = get_args(CudaGraphScope)
RECOMPUTE_MODULES: tuple[str, ...] = get_args(RecomputeModule)
OFFLOAD_MODULES: tuple[str, ...] = get_args(OffloadModule)
WHOLE_MOE = frozenset({"full_iteration", "moe"})
# torchtitan's selective checkpointing keeps every other GEMM's output; that of the MLP is the nearest module.
SELECTIVE_CHECKPOINTING = "mlp"


def plan_of(row: PublishedRow, stack: SoftwareStack, profile: HardwareProfile) -> Plan:
    """The plan of one row on its stack and machine. Raises CellError where the row cannot be expressed."""
    # Fine-tuning of all weights computes what pre-training does.
    tasks = ("lora",) if stack.time.trains_adapters else ("", "pretrain", "sft")
    task = row.text("task")
    if task not in tasks:
        raise CellError("task", f"got {short(task)}, stack {stack.name} allows {', '.join(filter(None, tasks))}")
    precision = precision_name(row)
    model = _model(row)
    sizes = _sizes(row)
    features = _features(row, stack, profile, model)
    fields: dict[str, Any] = {
        "model": model,
        "hardware": profile.name,
        "stack": stack.name,
        "precision": precision,
        **sizes,
        **_layout(row, model, sizes),
        **_memory_fields(row, features, stack),
        **_overlap_fields(row, features, model, sizes),
    }
    try:
        plan = validate(Plan, fields, "plan")
        problem = next(iter(stack.violations(model, plan.point)), None)
    except InvalidInputError as error:
        raise CellError("plan", error.message.removeprefix("plan: ")) from None
    if problem:
        raise CellError(*problem)
    return plan


@lru_cache(maxsize=256)
def _preset(name: str, layers: int | None, num_mtp: int | None) -> ModelSpec:
    model = load_model(name)
    changes: dict[str, int] = {}
    if layers is not None and layers != model.num_layers:
        changes |= {"num_layers": layers, "num_dense_layers": min(model.num_dense_layers, layers)}
    if num_mtp is not None and num_mtp != model.num_mtp_layers:
        changes |= {"num_mtp_layers": num_mtp, "mtp_shared": model.mtp_shared and num_mtp > 0}
    return validate(ModelSpec, model.model_dump() | changes, name) if changes else model


def _model(row: PublishedRow) -> ModelSpec:
    """The preset, with the layers and MTP depths of the row: a written layout says how many depths there are."""
    layers = row.count("layers") if row.text("layers") else None
    depths = row.count("mtp_layers", least=0) if row.text("mtp_layers") else None
    layout = _written_layout(row)
    try:
        if depths is None and layout:
            depths = PipelineLayout.from_string(layout).num_mtp
        return _preset(row.text("model"), layers, depths)
    except InvalidInputError as error:
        raise CellError("model", error.message) from None


def _written_layout(row: PublishedRow) -> str:
    """The layout string of a row; empty where a cell describes one in words."""
    written = row.text("pipeline_layout")
    return written if re.fullmatch(r"[EtmL|()*0-9\s,]+", written) else ""


def _sizes(row: PublishedRow) -> dict[str, int]:
    """Degrees and batch; unknown vp, mbs and etp read 1, vp 2 where the row overlaps exchanges, which takes stages."""
    counts = {"num_gpus": "n_gpus", "seq_len": "seq_len", "global_batch_size": "gbs"}
    sizes = {name: row.count(column) for name, column in counts.items()}
    sizes |= {name: row.count(name, 1) for name in ("mbs", "tp", "pp", "cp", "ep", "etp")}
    return sizes | {"vp": row.count("vp", 2 if row.flag("ep_overlap") and sizes["pp"] > 1 else 1)}


def _layout(row: PublishedRow, model: ModelSpec, sizes: dict[str, int]) -> dict[str, str]:
    """The layout string; else layers spread evenly, where they divide; else balanced by rule, as always with MTP.

    Counting embedding and loss as layers leaves MTP depths on the last stage, so recipes with them write a layout.
    """
    written, num_stages = _written_layout(row), sizes["pp"] * sizes["vp"]
    if written:
        return {"layout": written}
    layers = "t" * model.num_layers
    # Megatron can count embedding and loss as layers; recipes do where that divides and the layers alone do not.
    even = () if model.num_mtp_layers else ((layers, "E", "L"), (f"E{layers}L", "", ""))
    for parts, first, last in even:
        size, rest = divmod(len(parts), num_stages)
        if not rest:
            return {"layout": first + "|".join(parts[at : at + size] for at in range(0, len(parts), size)) + last}
    try:
        return {"layout": balanced_layout(model, num_stages).text}
    except InvalidInputError as error:
        raise CellError("pp", error.message) from None


def _features(row: PublishedRow, stack: SoftwareStack, profile: HardwareProfile, model: ModelSpec) -> Features:
    """Defaults of the stack, those that depend on the dispatcher with the row's own."""
    precision = precision_name(row)
    backend = backend_name(row.text("dispatcher"))
    if backend is None:
        backend = stack.features_of(model, profile, precision, None).backend
        captured = _graph(row.text("cuda_graph"), Features())
        if (
            WHOLE_MOE & set(captured)
            and routing_name(row.text("routing")) != "drop"
            and "hybridep" in stack.dispatchers
        ):
            backend = "hybridep"  # alone goes with such graphs (report section 3.4)
    found = stack.features_of(model, profile, precision, backend)
    return found.model_copy(update={"backend": backend or "alltoall"})


def _memory_fields(row: PublishedRow, features: Features, stack: SoftwareStack) -> dict[str, Any]:
    is_bridge = stack.name.startswith("megatron-bridge")
    low = PRECISIONS[precision_name(row)].quantized_bytes is not None
    return {
        "recompute": _recompute(row.text("recompute"), features),
        **_offload(row.text("offload"), features),
        "sharding": "full" if row.text("fsdp") not in ("", "0") else "optimizer",
        "grad_dtype": _float_type(row, "grad_dtype", "bf16" if is_bridge else "fp32"),
        "moment_dtype": _float_type(row, "moment_dtype", features.moment_dtype or "fp32"),
        "fp8_primary_weights": _primary_weights(row, features, stack) and low,
        "fp8_attention": bool(row.flag("fp8_attention")) and low,
        **features.kept_wide(is_low=low),
    }


def _primary_weights(row: PublishedRow, features: Features, stack: SoftwareStack) -> bool:
    stated = row.flag("fp8_primary_weights")
    wanted = features.fp8_primary_weights if stated is None else stated
    on_host = row.text("offload").startswith("opt_cpu")  # excluded together, report section 1.2
    return bool(wanted) and "fp8_primary_weights" in stack.features and not on_host


def _float_type(row: PublishedRow, column: str, default: str) -> str:
    written = row.text(column) or default
    if written not in ("fp32", "bf16"):
        raise CellError(column, f"got {short(written)}, allowed: fp32, bf16 or empty")
    return written


def _recompute(written: str, features: Features) -> tuple[str, ...]:
    if not written:
        return features.recompute or ()
    if written == "none":
        return ()
    if written.startswith("full"):
        return ("full",)
    if "selective AC" in written:
        return (SELECTIVE_CHECKPOINTING,)
    if written == "selective":  # the list left unset: Megatron's default
        return ("core_attn",)
    modules = parts_of(written.removeprefix("selective:").removesuffix("(default)"))
    unknown = [module for module in modules if module not in RECOMPUTE_MODULES]
    if unknown:
        raise CellError("recompute", f"got {short(written)}, allowed: none, full, {', '.join(RECOMPUTE_MODULES)}")
    return modules


def _offload(written: str, features: Features) -> dict[str, Any]:
    if not written:
        return {"offload_layers": features.offload_layers or 0, "offload_modules": features.offload_modules or ()}
    kind, _, detail = written.partition(":")
    try:
        if kind == "act_layers":
            return {"offload_layers": int(detail)}
        if kind == "opt_cpu":
            return {"optimizer_cpu_frac": float(detail.split()[0])}
    except (ValueError, IndexError):
        raise CellError("offload", f"got {short(written)}, allowed: act_layers:N, opt_cpu:FRACTION") from None
    if kind == "act_fine":
        modules = parts_of(detail)
        if modules and all(module in OFFLOAD_MODULES for module in modules):
            return {"offload_modules": modules}
    if written in ("none", "opt_states"):
        return {"offload_optimizer_states": written == "opt_states"}
    raise CellError(
        "offload", f"got {short(written)}, allowed: none, act_layers:N, act_fine:MODULES, opt_states, opt_cpu:F"
    )


def _overlap_fields(row: PublishedRow, features: Features, model: ModelSpec, sizes: dict[str, int]) -> dict[str, Any]:
    graph = _graph(row.text("cuda_graph"), features)
    fields: dict[str, Any] = {"cuda_graph": graph}
    overlaps = row.flag("tp_comm_overlap")
    wanted = features.tp_comm_overlap if overlaps is None else overlaps
    fields["tp_comm_overlap"] = bool(wanted) and sizes["tp"] > 1
    for key in ("overlap_grad_reduce", "overlap_param_gather"):
        fields[key] = row.flag(key) is not False
    if model.moe is None:
        return fields
    stated = row.flag("ep_overlap")
    by_default = bool(features.ep_overlap) and _can_overlap(row, features, model, sizes, graph)
    fields["ep_overlap"] = by_default if stated is None else stated and sizes["ep"] > 1
    fields["delay_wgrad"] = bool(row.flag("delay_wgrad")) and fields["ep_overlap"]
    fields["fused_grouped_mlp"] = bool(row.flag("fused_grouped_mlp"))
    backend = features.backend
    is_flex = backend not in ("alltoall", "allgather")
    fields |= {"dispatcher": "flex", "flex_backend": backend} if is_flex else {"dispatcher": backend}
    fields["dispatch_sms"] = row.count("dispatch_sms", 0, least=0)
    for key in ("permute_fusion", "router_fusion"):
        stated = row.flag(key)
        default = getattr(features, key)
        fields[key] = (default is None or default) if stated is None else stated
    fields["routing"] = routing_name(row.text("routing"))
    return fields


def _can_overlap(
    row: PublishedRow, features: Features, model: ModelSpec, sizes: dict[str, int], graph: tuple[str, ...]
) -> bool:
    """Whether what the row states leaves room for the overlap of a default (report section 2.5)."""
    if sizes["ep"] == 1 or features.backend == "allgather" or model.num_mtp_layers > 1:
        return False
    if sizes["pp"] > 1 and (sizes["vp"] == 1 or row.text("fsdp") not in ("", "0")):
        return False
    recomputed = _recompute(row.text("recompute"), features)
    return not {"full", "moe"} & set(recomputed) and not {"moe", "mlp"} & set(graph)


def _graph(written: str, features: Features) -> tuple[str, ...]:
    if not written:
        return features.cuda_graph or ()
    if written == "te":  # no scopes stated: what most rows that state them capture
        return features.cuda_graph or PARTIAL_GRAPH
    if written == "none":
        return ()
    if written.startswith("full_iteration"):
        return ("full_iteration",)
    if written.startswith("full"):  # the older switch: every layer whole
        return ("attn", "mlp")
    scopes = tuple(scope for scope in re.findall(r"[a-z_]+", written.partition(":")[2]) if scope in GRAPH_SCOPES)
    if not scopes:
        raise CellError(
            "cuda_graph", f"got {short(written)}, allowed: none, full_iteration, te:{'+'.join(GRAPH_SCOPES)}"
        )
    return scopes
