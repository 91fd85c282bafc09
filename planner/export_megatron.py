"""A Megatron-LM launch script: the flags of report section 11 that say the same plan to ``pretrain_gpt.py``.

Flags are those of Megatron-LM's main branch of 2026; the script says so, because names move between releases.
"""

import shlex
from collections.abc import Iterator, Mapping

from moeplan.errors import InvalidInputError
from moeplan.plan import Plan
from moeplan.planner.export_megatron_model import is_hybrid, model_flags
from moeplan.run_config import RunConfig
from moeplan.vocabulary import Bf16Module, PrecisionName, wide_precision

Flag = tuple[str, ...]

# bf16 compute beside each of them; fp32 leaves all of these out.
_PRECISION_FLAGS: dict[PrecisionName, tuple[Flag, ...]] = {
    "fp32": (),
    "bf16": (("bf16",),),
    "fp8_delayed": (("bf16",), ("fp8-format", "hybrid"), ("fp8-recipe", "delayed")),
    "fp8_current": (("bf16",), ("fp8-format", "hybrid"), ("fp8-recipe", "tensorwise")),
    "fp8_blockwise": (("bf16",), ("fp8-format", "e4m3"), ("fp8-recipe", "blockwise")),
    "mxfp8": (("bf16",), ("fp8-format", "e4m3"), ("fp8-recipe", "mxfp8")),
    "nvfp4": (("bf16",), ("fp4-format", "e2m1"), ("fp4-recipe", "nvfp4")),
}

# Settings that its flags cannot say. (Without memory_efficient_permutation a plan trains the same in less memory.)
_NO_FLAG = ("packed_lengths", "echo_slots", "paired_wgrad", "offload_layers")

# Rows that a rank's experts have room for, over the balanced number, and pages for kept ones on device and host: what
# Megatron-Bridge's recipes with full-iteration graphs set (set_full_iter_cg_configs). A step beyond it runs again.
_RANK_CAPACITY, _STASH_PAGES, _HOST_PAGES = 1.5, 1.2, 1.0

_WIDE_FILE = "wide_modules.yaml"
_WIDE_CONFIGS = """\
configs:
  bf16:
    transformer_engine_config_type: "TEQuantizationParams"
    training_recipe: {}
  mxfp8:
    transformer_engine_config_type: "TEQuantizationParams"
    training_recipe:
      fp8_quantization_recipe: "mxfp8"
matchers:
"""
_MODULE_PATTERNS: dict[Bf16Module, tuple[str, ...]] = {
    "attention": ("*.linear_qkv", "*.linear_proj"),
    "latent": ("*.fc1_latent_proj", "*.fc2_latent_proj"),
    "linear_out": ("*mixer.out_proj",),
    "mtp": ("*mtp.layers.*",),
}

_SCRIPT = """\
#!/bin/bash
# Plan {plan_id} for Megatron-LM (flags of its main branch of 2026), from the root of its repository: run this on each
# of {num_hosts} hosts, with NODE_RANK and MASTER_ADDR set, and your data and tokenizer in place of the mock ones.
{routing}set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS={connections}

torchrun --nnodes={num_hosts} --nproc-per-node={gpus} --node-rank="${{NODE_RANK:-0}}" \\
  --master-addr="${{MASTER_ADDR:-localhost}}" --master-port="${{MASTER_PORT:-29500}}" \\
  {entry} \\
{flags}
"""

# A line of the script's header.
_ROUTING_NOTES = {
    "balanced": "# Predicted with experts loaded alike; to measure just that, add --moe-router-force-load-balancing.",
    "natural": "# Predicted with the uneven load of natural routing.",
    "drop": "# Predicted with tokens beyond each expert's capacity dropped.",
}


def megatron_files(plan: Plan, run: RunConfig, gpus_per_host: int) -> Mapping[str, str]:
    """The script. Raises InvalidInputError for what Megatron-LM has no flag for."""
    flags = [*model_flags(plan.model, plan.seq_len, plan.pipeline), *_plan_flags(plan), *_run_flags(run, plan)]
    lines = [f"  {shlex.join([f'--{name}', *values])}" for name, *values in flags]
    script = _SCRIPT.format(
        plan_id=plan.plan_id,
        num_hosts=plan.num_gpus // gpus_per_host,
        gpus=gpus_per_host,
        connections=32 if plan.ep_overlap or plan.sharding == "full" else 1,  # it refuses 1 for these
        entry="pretrain_hybrid.py" if is_hybrid(plan.model) else "pretrain_gpt.py",
        flags=" \\\n".join(lines),
        routing=f"{_ROUTING_NOTES[plan.routing]}\n" if plan.model.moe else "",
    )
    return {"pretrain.sh": script, **_wide_modules(plan)}


def _wide_modules(plan: Plan) -> dict[str, str]:
    """What stays out of low precision, in the form of Megatron-LM's ``--te-precision-config-file``."""
    if not plan.bf16_modules:
        return {}
    matchers = [
        f'  {module}_{index}:\n    type: "glob"\n    enabled: true\n    pattern: "{pattern}"\n'
        f'    config: "{wide_precision(module, plan.precision)}"\n'
        for module in plan.bf16_modules
        for index, pattern in enumerate(_MODULE_PATTERNS[module])
    ]
    return {_WIDE_FILE: _WIDE_CONFIGS + "".join(matchers)}


def _check(plan: Plan) -> None:
    for key in _NO_FLAG:
        got, default = getattr(plan, key), Plan.model_fields[key].default
        if got != default:
            hint = "use offload_modules" if key == "offload_layers" else "train it with moeplan"
            raise InvalidInputError(f"{key}: got {got}, Megatron-LM has no flag for it", hint)
    if plan.dynamic_cp:
        raise InvalidInputError(
            "dynamic_cp: got True, Megatron-LM has it for data of its own lengths, and this script's is mock data",
            "export the plan without it, then add --hybrid-context-parallel and --max-seqlen-per-dp-cp-rank",
        )
    for key, allowed in (("grad_dtype", ("fp32", "bf16")), ("moment_dtype", ("fp32", "bf16", "fp8"))):
        if getattr(plan, key) not in allowed:
            raise InvalidInputError(
                f"{key}: got {getattr(plan, key)}, Megatron-LM has {', '.join(allowed)}", "use fp32"
            )


def _plan_flags(plan: Plan) -> Iterator[Flag]:
    _check(plan)
    yield from _folding_flags(plan)
    if plan.precision not in _PRECISION_FLAGS:
        allowed = ", ".join(_PRECISION_FLAGS)
        raise InvalidInputError(f"precision: got {plan.precision!r}, Megatron-LM has {allowed}", "search again")
    yield from _PRECISION_FLAGS[plan.precision]
    if plan.fp8_primary_weights:
        yield ("fp4-param-gather",) if plan.precision == "nvfp4" else ("fp8-param-gather",)
    if plan.fp8_attention:
        yield ("fp8-dot-product-attention",)
    if any(plan.point.bf16_ends):
        yield ("first-last-layers-bf16",)
        yield "num-layers-at-start-in-bf16", str(plan.bf16_first_layers)
        yield "num-layers-at-end-in-bf16", str(plan.bf16_last_layers)
    if plan.bf16_modules:
        yield "te-precision-config-file", _WIDE_FILE
    yield from _recompute_flags(plan)
    yield from _optimizer_flags(plan)
    if plan.model.moe is not None:
        yield from _expert_flags(plan)
    if plan.cuda_graph == ("full_iteration",):
        yield "cuda-graph-impl", "full_iteration"
        yield ("no-check-for-nan-in-loss-and-grad",)
        yield ("te-rng-tracker",)
    elif plan.cuda_graph:
        yield "cuda-graph-impl", "transformer_engine"
        yield "cuda-graph-modules", *plan.cuda_graph
        yield ("te-rng-tracker",)


def _folding_flags(plan: Plan) -> Iterator[Flag]:
    yield "tensor-model-parallel-size", str(plan.tp)
    if plan.tp > 1:
        yield ("sequence-parallel",)
    yield "pipeline-model-parallel-size", str(plan.pp)
    if plan.pp > 1 and not is_hybrid(plan.model):  # its pattern says it
        yield "pipeline-model-parallel-layout", plan.layout
    if plan.vp > 1 and plan.micro_batch_group_size:
        yield "microbatch-group-size-per-virtual-pipeline-stage", str(plan.micro_batch_group_size)
    if plan.cp > 1:
        yield "context-parallel-size", str(plan.cp)
        yield "cp-comm-type", plan.cp_comm
        if plan.cp_comm == "a2a+p2p":
            yield "hierarchical-context-parallel-sizes", str(plan.cp_a2a_size), str(plan.cp // plan.cp_a2a_size)
    yield "micro-batch-size", str(plan.mbs)
    yield "global-batch-size", str(plan.global_batch_size)
    yield "seq-length", str(plan.seq_len)
    if plan.tp_comm_overlap:
        yield ("tp-comm-overlap",)


def _recompute_flags(plan: Plan) -> Iterator[Flag]:
    if plan.recompute == ("full",):
        yield "recompute-granularity", "full"
        yield "recompute-method", "uniform"
        yield "recompute-num-layers", "1"
    elif plan.recompute:
        yield "recompute-granularity", "selective"
        yield "recompute-modules", *plan.recompute
    if plan.offload_modules:
        yield ("fine-grained-activation-offloading",)
        yield "offload-modules", *plan.offload_modules


def _optimizer_flags(plan: Plan) -> Iterator[Flag]:
    if plan.sharding == "full":
        yield ("use-megatron-fsdp",)
        yield "data-parallel-sharding-strategy", "optim_grads_params"
    if plan.sharding != "none":
        yield ("use-distributed-optimizer",)
        yield from [("overlap-param-gather",)] if plan.overlap_param_gather else []
    if plan.overlap_grad_reduce:
        yield ("overlap-grad-reduce",)
    if plan.grad_dtype == "bf16":
        yield ("grad-reduce-in-bf16",)
    if plan.dp_replicate > 1:
        yield "num-distributed-optimizer-instances", str(plan.dp_replicate)
    if plan.main_weight_remainders or plan.moment_dtype in {"bf16", "fp8"}:
        yield (
            "use-precision-aware-optimizer",
        )  # keeps remainders of main weights with Transformer Engine 2.1 or later
    if plan.moment_dtype in {"bf16", "fp8"}:
        yield "exp-avg-dtype", plan.moment_dtype
        yield "exp-avg-sq-dtype", plan.moment_dtype
    if plan.optimizer_cpu_frac:
        yield ("optimizer-cpu-offload",)
        yield "optimizer-offload-fraction", f"{plan.optimizer_cpu_frac:g}"
    if plan.offload_optimizer_states:
        yield ("offload-optimizer-states",)


def _expert_flags(plan: Plan) -> Iterator[Flag]:
    yield "expert-model-parallel-size", str(plan.ep)
    yield "expert-tensor-parallel-size", str(plan.etp)
    yield "moe-token-dispatcher-type", plan.dispatcher
    if plan.dispatcher == "flex":
        if plan.flex_backend == "torch":
            raise InvalidInputError(
                "flex_backend: got 'torch', Megatron-LM has deepep and hybridep", "predict the plan with one of them"
            )
        yield "moe-flex-dispatcher-backend", plan.flex_backend
        if plan.dispatch_sms:
            yield "moe-flex-dispatcher-num-sms", str(plan.dispatch_sms)
    yield ("moe-grouped-gemm",)
    yield from _static_shape_flags(plan)
    if plan.routing == "drop" and plan.model.moe is not None:
        router = plan.model.moe.router
        yield "moe-expert-capacity-factor", f"{router.capacity_factor:g}"
        yield "moe-token-drop-policy", router.drop_policy
        if router.pad_to_capacity:
            yield ("moe-pad-expert-input-to-capacity",)
    switches = {
        "moe-permute-fusion": plan.permute_fusion,
        "moe-router-fusion": plan.router_fusion,
        "moe-shared-expert-overlap": plan.shared_expert_overlap,
        "overlap-moe-expert-parallel-comm": plan.ep_overlap,
        "delay-wgrad-compute": plan.delay_wgrad,
        "use-transformer-engine-op-fuser": plan.fused_grouped_mlp,
    }
    yield from ((name,) for name, is_on in switches.items() if is_on)


_DECAY_STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}


def _static_shape_flags(plan: Plan) -> Iterator[Flag]:
    """Buffers of dropless experts sized ahead, as paged stashing and graphs of a whole iteration need them.

    Raises InvalidInputError without the dispatcher and the fused experts that read their sizes on the device (report
    section 3.5).
    """
    router = plan.model.moe.router if plan.model.moe is not None else None
    is_padded = plan.routing == "drop" and router is not None and router.pad_to_capacity
    is_whole = plan.cuda_graph == ("full_iteration",) and not is_padded
    if not is_whole and not plan.paged_stash_factor:
        return
    what = "cuda_graph: full_iteration" if is_whole else f"paged_stash_factor: {plan.paged_stash_factor:g}"
    if plan.dispatcher != "flex" or plan.flex_backend != "hybridep" or not plan.fused_grouped_mlp:
        raise InvalidInputError(
            f"{what} of dropless experts, in Megatron-LM only with flex_backend hybridep and fused_grouped_mlp",
            "search again with --fix dispatcher=flex,flex_backend=hybridep,fused_grouped_mlp=true, or without it",
        )
    yield "moe-expert-rank-capacity-factor", f"{_RANK_CAPACITY:g}"
    yield ("moe-paged-stash",)
    yield "moe-paged-stash-buffer-size-factor-cuda", f"{plan.paged_stash_factor or _STASH_PAGES:g}"
    yield "moe-paged-stash-buffer-size-factor-cpu", f"{_HOST_PAGES:g}"


def _run_flags(run: RunConfig, plan: Plan) -> Iterator[Flag]:
    yield "train-iters", str(run.steps)
    yield "lr", f"{run.lr:g}"
    yield "min-lr", f"{run.lr * run.min_lr_frac:g}"
    yield "lr-warmup-iters", str(run.lr_warmup_steps)
    yield "lr-decay-style", _DECAY_STYLES[run.lr_schedule]
    yield "lr-decay-iters", str(run.lr_decay_steps or run.steps)
    if run.lr_schedule == "wsd":
        yield "lr-wsd-decay-style", "linear"
        yield "lr-wsd-decay-iters", str(run.lr_cooldown_steps)
    yield "adam-beta1", f"{run.adam_beta1:g}"
    yield "adam-beta2", f"{run.adam_beta2:g}"
    yield "adam-eps", f"{run.adam_eps:g}"
    yield "weight-decay", f"{run.weight_decay:g}"
    yield "clip-grad", f"{run.clip_grad_norm:g}"
    yield "seed", str(run.seed)
    if run.force_balance and plan.model.moe is not None:
        yield ("moe-router-force-load-balancing",)
    if run.separate_documents:
        yield from (("reset-position-ids",), ("reset-attention-mask",), ("eod-mask-loss",))
    yield ("mock-data",)
    yield "eval-iters", str(run.eval_batches if run.eval_every else 0)
    if run.eval_every:
        yield "eval-interval", str(run.eval_every)
    if run.save_folder:
        yield "save", run.save_folder
        yield "load", run.save_folder
        if run.save_every:
            yield "save-interval", str(run.save_every)
        if run.save_async:
            yield ("async-save",)
