"""What the executor cannot run, said before anything starts. Imports no torch, so that planning can ask too."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from moeplan.errors import InvalidInputError
from moeplan.executor.routing_files import check_replay
from moeplan.hf_export import hf_config_of
from moeplan.hf_folder import check_model, open_folder
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from moeplan.upcycling import check_upcycling
from moeplan.vocabulary import PRECISIONS

# Fields that Megatron executes and the native executor does not.
_DEFAULT_ONLY = (
    "fused_grouped_mlp", "permute_fusion", "router_fusion", "fp8_attention",
    "tp_comm_overlap",
)  # fmt: skip
_WORD_ELEMENTS = 8  # of bf16 in 16 bytes


def check_supported(plan: Plan) -> None:
    """Raise InvalidInputError naming the first key of the plan that the native executor does not run."""
    for key, got, allowed, hint in (*_plan_limits(plan), *_model_limits(plan.model, plan.etp)):
        raise InvalidInputError(f"{key}: got {got}, the native executor runs {allowed}", hint)


def _plan_limits(plan: Plan) -> Iterator[tuple[str, object, str, str]]:
    if plan.precision != "fp64" and plan.moment_dtype == "fp64":
        yield "moment_dtype", plan.moment_dtype, "fp32, bf16 and fp8 Adam moments", "use fp32"
    if plan.model.moe is not None and plan.dispatcher == "flex":
        yield from _library_limits(plan)
    if plan.dispatch_sms and (plan.dispatcher, plan.flex_backend == "torch") != ("flex", False):
        yield "dispatch_sms", plan.dispatch_sms, "0, but for the libraries of flex", "leave dispatch_sms out"
    if plan.echo_slots and PRECISIONS[plan.precision].quantized_bytes is not None:
        yield "echo_slots", plan.echo_slots, "it with experts in bf16, fp32 or fp64", "leave echo_slots out"
    if plan.paired_wgrad and plan.precision in {"mxfp8", "nvfp4"}:  # whose kernels would add the two one by one
        allowed = "it with experts in FP8, bf16, fp32 or fp64"
        yield "paired_wgrad", list(plan.paired_wgrad), allowed, "leave paired_wgrad out"
    if plan.cuda_graph:
        yield from _graph_limits(plan)
    if plan.dynamic_cp:
        yield from _dynamic_cp_limits(plan)
    if plan.offload_modules and PRECISIONS[plan.precision].quantized_bytes is not None:
        allowed = "offload_modules where modules keep their inputs as they are"
        yield "offload_modules", list(plan.offload_modules), allowed, "use offload_layers, or precision bf16"
    if plan.fp8_primary_weights:
        yield from _primary_weight_limits(plan)
    if plan.model.mtp_shared and sum(stage.num_mtp > 0 for stage in plan.pipeline.stages) > 1:
        allowed = "MTP depths that share their weights in one stage"
        yield "layout", plan.pipeline.text, allowed, "put all m of the layout into one stage"
    for key in _DEFAULT_ONLY:
        got, default = getattr(plan, key), Plan.model_fields[key].default
        if got != default:
            yield key, got, f"{key} {default}", f"leave {key} out: it can be predicted, not run"


def _graph_limits(plan: Plan) -> Iterator[tuple[str, object, str, str]]:
    """What a graph of all micro-batches needs: one GPU, where no shape depends on routing, and no host in between."""
    if plan.cuda_graph != ("full_iteration",) or plan.num_gpus > 1:
        allowed = "none, and full_iteration on one GPU"
        yield "cuda_graph", f"{', '.join(plan.cuda_graph)} on {plan.num_gpus} GPUs", allowed, "leave cuda_graph out"
    # Grouped GEMMs of other types, and of rows of broken 16-byte words, ask the device where experts begin.
    if plan.precision != "bf16":
        yield "precision", plan.precision, "bf16 in a CUDA graph", "leave cuda_graph out"
    widths = (plan.model.expert_hidden_size, plan.model.moe.expert_ffn_size) if plan.model.moe is not None else ()
    if any(width % _WORD_ELEMENTS for width in widths):
        allowed = f"expert rows and widths in multiples of {_WORD_ELEMENTS} in a CUDA graph"
        yield "cuda_graph", f"full_iteration with {' and '.join(map(str, widths))}", allowed, "leave cuda_graph out"
    if plan.offload_layers or plan.offload_modules:
        yield "cuda_graph", "full_iteration", "it without offload", "leave cuda_graph out"


def _dynamic_cp_limits(plan: Plan) -> Iterator[tuple[str, object, str, str]]:
    """Ranks hold different numbers of tokens; what is balanced or dropped must not depend on how they are packed."""
    moe = plan.model.moe
    if moe is None:
        return
    if plan.dispatcher == "flex" and plan.flex_backend != "torch" and plan.ep * plan.etp > 1:
        allowed = "torch under dynamic_cp: libraries have buffers for equal micro-batches"
        yield "flex_backend", plan.flex_backend, allowed, "set flex_backend = 'torch'"
    if plan.routing == "drop":
        yield "routing", "drop", "it without dynamic_cp: capacity is by tokens of a rank", "route without drops"
    if plan.paired_wgrad:
        allowed = "it without dynamic_cp: pairs want a fixed number of micro-batches"
        yield "paired_wgrad", list(plan.paired_wgrad), allowed, "leave paired_wgrad out"
    if plan.paged_stash_factor:
        allowed = "it without dynamic_cp: pages are for equal micro-batches"
        yield "paged_stash_factor", plan.paged_stash_factor, allowed, "leave paged_stash_factor out"
    if moe.router.aux_loss == "global_aux_loss":
        allowed = "aux_loss of packs and seq_aux_loss of documents under dynamic_cp"
        yield "model.moe.router.aux_loss", "global_aux_loss", allowed, "use seq_aux_loss"


def check_places(plan: Plan, run: RunConfig) -> None:
    """Raise InvalidInputError where a run needs each token's place in sequences of one length."""
    if plan.dynamic_cp and run.data_order == "shuffled":
        raise InvalidInputError(
            "data_order: got shuffled with dynamic_cp, whose documents differ in length; allowed: random",
            "leave data_order out",
        )
    for key, allowed in (("cp", 1), ("dynamic_cp", False), ("packed_lengths", ()), ("cuda_graph", ())):
        got = getattr(plan, key)
        if run.separate_documents and got != allowed:
            raise InvalidInputError(
                f"separate_documents: got true with {key} {got}, allowed: {allowed}, as documents of any length are "
                "known only when they are read, and not cut into equal chunks",
                f"leave {key} out of the plan, or train on sequences as they are",
            )
    for key in ("record_routing", "replay_routing"):
        if plan.dynamic_cp and getattr(run, key):
            raise InvalidInputError(
                f"{key}: got {getattr(run, key)} with dynamic_cp, whose documents have no place in sequences",
                f"leave {key} out, or train without dynamic_cp",
            )


def check_shared_depths(plan: Plan, run: RunConfig) -> None:
    """Raise InvalidInputError where experts are set by micro-batch for a router that several depths run in each."""
    keys = ["record_routing", "replay_routing"]
    if {"full", "moe"} & set(plan.recompute):  # in backward the last depth asks first
        keys.append("force_balance")
    for key in keys:
        if plan.model.mtp_shared and plan.model.num_mtp_layers > 1 and getattr(run, key):
            raise InvalidInputError(
                f"{key}: got {getattr(run, key)} with mtp_shared, whose depths ask one router for each micro-batch",
                f"leave {key} out, or train with num_mtp_layers = 1",
            )


def check_graph(plan: Plan, run: RunConfig) -> None:
    """Raise InvalidInputError where the run looks at the routing of a micro-batch that a CUDA graph hides."""
    for key in ("force_balance", "record_routing", "replay_routing"):
        if plan.cuda_graph and getattr(run, key):
            raise InvalidInputError(
                f"{key}: got {getattr(run, key)} with cuda_graph {', '.join(plan.cuda_graph)}",
                "leave cuda_graph out of the plan",
            )


def _library_limits(plan: Plan) -> Iterator[tuple[str, object, str, str]]:
    """What flex needs: on collectives nothing, else the package deep_ep, whose kernels take bf16 alone."""
    if plan.flex_backend == "torch":
        return
    if find_spec("deep_ep") is None:
        allowed = "torch here, where the package deep_ep is not installed"
        yield "flex_backend", plan.flex_backend, allowed, "set flex_backend = 'torch', or build DeepEP"
    if plan.precision in {"fp64", "fp32"}:
        yield "precision", plan.precision, f"flex_backend {plan.flex_backend} in bf16", "set flex_backend = 'torch'"


def _primary_weight_limits(plan: Plan) -> Iterator[tuple[str, object, str, str]]:
    if not plan.precision.startswith("fp8_"):
        allowed = "fp8_primary_weights with FP8 recipes, whose two forms of a weight have the same scales"
        yield "precision", plan.precision, allowed, "set fp8_primary_weights = false"
    if plan.sharding == "full":
        yield "sharding", plan.sharding, "fp8_primary_weights with none and optimizer", "set sharding = 'optimizer'"


def _model_limits(model: ModelSpec, etp: int) -> Iterator[tuple[str, object, str, str]]:
    moe = model.moe
    if moe is not None and moe.mlp_bias and model.expert_hidden_size % etp:
        allowed = f"expert biases where etp divides the {model.expert_hidden_size} channels of experts' rows"
        yield "etp", etp, allowed, "lower etp"


def check_run(run: RunConfig) -> None:
    """Raise InvalidInputError unless steps are left to time between warm-up and profiling."""
    spent = run.warmup_steps_untimed + run.profile_steps
    if run.steps <= spent:
        raise InvalidInputError(
            f"steps: got {run.steps}, allowed: more than warmup_steps_untimed {run.warmup_steps_untimed} + "
            f"profile_steps {run.profile_steps} = {spent}",
            "raise steps, or lower the other two",
        )
    check_replay(run)
    check_saving(run)


def check_saving(run: RunConfig) -> None:
    """Raise InvalidInputError where checkpoints are asked for without a folder for them."""
    for key in ("resume", "auto_resume", "save_every", "save_async", "keep_checkpoints"):
        if getattr(run, key) and not run.save_folder:
            raise InvalidInputError(f"{key}: got {getattr(run, key)} without save_folder", "give a save_folder")


def check_world(plan: Plan, num_processes: int) -> None:
    """Raise InvalidInputError unless there is one process for each GPU of the plan."""
    if num_processes != plan.num_gpus:
        raise InvalidInputError(
            f"processes: got {num_processes} for a plan of {plan.num_gpus} GPUs, allowed: exactly {plan.num_gpus}",
            f"start {plan.num_gpus} processes, or search a plan for {num_processes}",
        )


def check_export(plan: Plan, run: RunConfig) -> None:
    """Raise InvalidInputError where the run's weights could not be exported at its end."""
    if not run.export_hf:
        return
    hf_config_of(plan.model)
    folder = Path(run.export_hf)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(f"export_hf {folder}: exists and is not an empty folder", "name a new folder")
    _check_safetensors("export_hf")


def check_init_from(plan: Plan, run: RunConfig) -> None:
    """Raise InvalidInputError where the run's first weights are not there, or are of another model."""
    if not run.init_from:
        if run.upcycle:
            raise InvalidInputError("upcycle: got true without init_from", "give the folder of a dense checkpoint")
        return
    _check_safetensors("init_from")
    folder = open_folder(Path(run.init_from))
    if run.upcycle:
        check_upcycling(folder, plan.model)
    else:
        check_model(folder, plan.model)


def _check_safetensors(key: str) -> None:
    if find_spec("safetensors") is None:
        raise InvalidInputError(f"{key}: the package safetensors is not installed", "pip install safetensors")
