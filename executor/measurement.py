"""A run's figures, in the schema of predictions: gathered over ranks, made by rank 0."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from moeplan.executor.measure import PeakBytes, context_bytes, resident_bytes, spread_frac
from moeplan.executor.train import Trainer, TrainingRecord
from moeplan.flops import training_flops_per_token
from moeplan.kernels.back_end_choice import choices
from moeplan.plan import Plan
from moeplan.results import FamilyTime, Figures
from moeplan.run_config import RunConfig
from moeplan.units import GIB, TFLOP, format_bytes
from moeplan.vocabulary import MemoryCategory, OpFamily

_MAX_KERNEL_NAME = 100  # letters: templates go on for pages
_OWN_BYTES = 2 * GIB  # four times what a context takes (0.5 GB, docs/hardware.md): what is beyond is of others
_MEMORY_NOTE = "activations hold logits and buffers too: the peak less everything else"


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured. ``taken_before_bytes``: of a GPU, before the ranks met."""

    step_times_s: list[float]
    memory_bytes: dict[MemoryCategory, float]
    family_times: dict[OpFamily, FamilyTime]
    taken_before_bytes: float = 0.0


def taken_bytes(device: torch.device) -> float:
    """Memory that is gone now, by this process and, on a GPU, by whoever else has some there."""
    return context_bytes(device) if device.type == "cuda" else resident_bytes()


def measure_rank(trainer: Trainer, record: TrainingRecord, taken_before_bytes: float) -> RankFigures:
    """This rank's times and memory.

    ``taken_before_bytes``: :func:`taken_bytes` before the model was built, on a GPU before the ranks met.
    """
    memory = memory_by_category(trainer, record.peak_bytes, taken_before_bytes)
    on_gpu_bytes = taken_before_bytes if trainer.device.type == "cuda" else 0.0
    return RankFigures(record.step_times_s, memory, record.family_times, on_gpu_bytes)


def memory_by_category(trainer: Trainer, peak: PeakBytes, taken_before_bytes: float) -> dict[MemoryCategory, float]:
    """A rank's peak by category, activations with logits and buffers.

    On CUDA the sum without ``framework`` is what tensors took at their peak, and ``framework`` is the context and
    what the allocator reserved beyond that: the whole sum is what the device must have.
    """
    optimizer, device = trainer.optimizer, trainer.device
    on_cuda = device.type == "cuda"
    state: dict[MemoryCategory, float] = {
        "weights": optimizer.weight_bytes,
        "gradients": optimizer.grad_bytes,
        "optimizer": optimizer.state_bytes,
    }
    reserve_bytes = peak.reserved - peak.allocated
    framework_bytes = context_bytes(device) + reserve_bytes if on_cuda else taken_before_bytes
    live_bytes = peak.allocated if on_cuda else peak.allocated - taken_before_bytes
    activations_bytes = max(0.0, live_bytes - sum(state.values()))
    return {**state, "framework": framework_bytes, "activations": activations_bytes}


def notes_on(plan: Plan, run: RunConfig, taken_before_bytes: float) -> tuple[str, ...]:
    """What a reader must know of these figures. Sharding over one rank sends nothing.

    ``taken_before_bytes``: of the GPU with most of it gone before the ranks met.
    """
    notes = [_MEMORY_NOTE]
    if taken_before_bytes > _OWN_BYTES:
        notes.append(
            f"framework counts what other processes have on a GPU: {format_bytes(taken_before_bytes)} of it were gone "
            "before the run began"
        )
    if run.separate_documents:
        notes.append("model FLOPs count sequences as whole, not their documents (separate_documents)")
    if plan.num_gpus > plan.tp * plan.pp:
        if not plan.overlap_grad_reduce:
            notes.append("gradients are reduced without overlap (overlap_grad_reduce)")
        if not plan.overlap_param_gather:
            notes.append("weights are gathered without overlap (overlap_param_gather)")
    return tuple(notes)


def make_figures(
    plan: Plan, run: RunConfig, ranks: list[RankFigures], record: TrainingRecord, device: torch.device
) -> Figures:
    """Median over the timed steps of the slowest rank's time; memory of the worst rank of each pipeline stage.

    ``record`` is rank 0's: losses are the same on all ranks, and its kernels and power stand for all.
    """
    slowest_s = [max(times) for times in zip(*(rank.step_times_s for rank in ranks), strict=True)]
    timed_s = slowest_s[run.warmup_steps_untimed : len(slowest_s) - run.profile_steps]
    step_s = float(torch.tensor(timed_s, dtype=torch.float64).quantile(0.5))
    tokens_per_s_per_gpu = plan.tokens_per_step / step_s / plan.num_gpus
    stages = [
        max(
            ranks[start : start + plan.folding.stage_size],
            key=lambda rank: sum(rank.memory_bytes.values()),
        )
        for start in range(0, plan.num_gpus, plan.folding.stage_size)
    ]
    memory = {category: tuple(stage.memory_bytes[category] for stage in stages) for category in stages[0].memory_bytes}
    return Figures(
        kind="measurement",
        plan_id=plan.plan_id,
        stack=plan.stack,
        hardware=plan.hardware,
        step_s=step_s,
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        model_tflops_per_gpu=tokens_per_s_per_gpu
        * training_flops_per_token(plan.model, plan.seq_len, plan.flop_lengths)
        / TFLOP,
        peak_memory_bytes=max(sum(stage.memory_bytes.values()) for stage in stages),
        memory_bytes=memory,
        time_s=_mean_times([rank.family_times for rank in ranks]),
        error_bar_frac=spread_frac(timed_s),
        provenance=_provenance(plan, run, device) | _device_provenance(record, device),
        notes=notes_on(plan, run, max(rank.taken_before_bytes for rank in ranks)),
        step_times_s=tuple(timed_s),
        losses=tuple(record.losses),
        validation_losses=tuple(record.validation_losses),
    )


def _mean_times(ranks: list[dict[OpFamily, FamilyTime]]) -> dict[OpFamily, FamilyTime]:
    families = sorted({family for rank in ranks for family in rank})
    zero = FamilyTime(total_s=0, exposed_s=0)
    return {
        family: FamilyTime(
            total_s=sum(rank.get(family, zero).total_s for rank in ranks) / len(ranks),
            exposed_s=sum(rank.get(family, zero).exposed_s for rank in ranks) / len(ranks),
        )
        for family in families
    }


def _provenance(plan: Plan, run: RunConfig, device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type}: {name}",
        "processes": str(plan.num_gpus),
        "threads_per_process": str(torch.get_num_threads()),
        "precision": plan.precision,
        "seed": str(run.seed),
        "data": run.data or ", ".join(run.data_mix) or "standard library sources",
        "steps": f"{run.steps}: {run.warmup_steps_untimed} untimed first, {run.profile_steps} traced last",
    }


def _device_provenance(record: TrainingRecord, device: torch.device) -> dict[str, str]:
    """Versions, kernels, power and the parts of ``framework`` of a CUDA run; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    peak = record.peak_bytes
    versions = {
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": _driver_version(),
        "transformer_engine": _installed_version("transformer_engine"),
    }
    memory = {
        "peak_allocated": format_bytes(peak.allocated),
        "peak_reserved": format_bytes(peak.reserved),
        "context": format_bytes(context_bytes(device)),
    }
    kernels = {f"kernel_{family}": name[:_MAX_KERNEL_NAME] for family, name in record.kernels.items()}
    chosen = {f"back_end_{operation}": backend for operation, backend in choices().items()}
    return {**versions, **chosen, **kernels, **memory, **record.power.provenance()}


def _driver_version() -> str:
    """Of the NVIDIA kernel module, or a word that says it is not to be had."""
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text(encoding="ascii", errors="replace").split() if path.exists() else []
    return next((word for word in words if word.count(".") == 2 and word[0].isdigit()), "unknown")


def _installed_version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
