"""Software stacks: which engine and release executes a plan, what it can run, and what it keeps in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, PositiveInt, field_validator

from moeplan.errors import InvalidInputError, nearest_names
from moeplan.files import read_toml, validate
from moeplan.hwprofiles.schema import DispatchBackend, HardwareProfile, Sourced
from moeplan.model_spec import ModelSpec
from moeplan.point import Point
from moeplan.record import Record
from moeplan.simulator.stack_defaults import DefaultRule, Features, Setting, features
from moeplan.simulator.stack_time import StackTime
from moeplan.vocabulary import CpComm, CudaGraphScope, PrecisionName, RecomputeModule

# DeepEP's exchange between hosts presumes as many NVLink peers in each (DeepEP issues 90, 104, 464).
NODE_GPUS = 8
STACK_FOLDER = Path(__file__).parent / "stacks"

Feature = Literal[
    "ep_overlap",
    "delay_wgrad",
    "shared_expert_overlap",
    "dispatch_sms",
    "cuda_graph",
    "fused_grouped_mlp",
    "fp8_primary_weights",
    "fp8_attention",
    "tp_comm_overlap",
    "full_sharding",
    "offload_layers",
    "offload_modules",
    "offload_optimizer_states",
    "optimizer_cpu_frac",
    "echo_slots",
    "paged_stash_factor",
    "paired_wgrad",
    "bf16_first_layers",
    "bf16_last_layers",
    "bf16_modules",
]
FEATURES: tuple[Feature, ...] = get_args(Feature)
SavedTensorTable = Literal["megatron", "native", "torchtitan", "korthikanti-2022"]


class KnownFailure(Record):
    """A dispatcher that a release cannot run on some machines."""

    backend: DispatchBackend
    hardware: tuple[str, ...]
    across_domains: bool = Field(default=True, description="only where the expert group leaves the NVLink domain")
    ref: str


class SoftwareStack(Record):
    """One engine at one release. Every number carries its source; a plan names its stack, and so does a prediction.

    The same plan costs different time and memory on different stacks, so a planner searches only what the stack
    executes: ``precisions``, ``dispatchers`` (``alltoall``, or a back end of the flex dispatcher), ``recompute``
    and the ``max_`` degrees (None: any).
    """

    name: str
    description: str
    source: str

    # What it executes
    precisions: tuple[PrecisionName, ...] = Field(min_length=1)
    dispatchers: tuple[DispatchBackend, ...] = Field(description="empty: the engine has no MoE layer")
    optional_dispatchers: tuple[DispatchBackend, ...] = Field(
        default=(), description="run where a library is installed, so searched only where asked for"
    )
    recompute: tuple[RecomputeModule, ...]
    features: tuple[Feature, ...] = Field(default=(), description="further settings of a plan that it executes")
    defaults: tuple[DefaultRule, ...] = Field(default=(), description="what its recipes set; the first rule wins")
    ep_covers_tp: bool = Field(default=False, description="refuses an ep below tp for MoE models")
    pads_shards: bool = Field(default=True, description="pads biases of experts that do not divide by etp")
    excluded: tuple[dict[str, Any], ...] = Field(
        default=(),
        description="settings it does not run together: all of an entry; a list gives alternatives, true is any on",
    )
    graph_scopes: tuple[CudaGraphScope, ...] = Field(
        default=get_args(CudaGraphScope), description="what its CUDA graphs may hold"
    )
    max_graph_gpus: PositiveInt | None = Field(default=None, description="GPUs of a plan with CUDA graphs")
    known_failures: tuple[KnownFailure, ...] = Field(default=(), description="settings that hang or fail on a machine")
    max_pp: PositiveInt | None = None
    max_vp: PositiveInt | None = None
    max_cp: PositiveInt | None = None
    cp_comm: tuple[CpComm, ...] = Field(default=get_args(CpComm), description="kinds of context parallelism it runs")
    grouped_gemm_backend: str = Field(description="name of the grouped GEMM curves of a hardware profile to use")
    whole_experts_backend: str | None = Field(
        default=None,
        description="the same of plans in bf16 with ep 1 and without graphs, where a profile has such curves",
    )

    # What it keeps in memory
    saved_tensors: SavedTensorTable = Field(description="table of tensors kept for backward, in activations.py")
    fused_attention: bool = Field(description="False: the score matrix is kept")
    logit_bytes: Sourced = Field(description="bytes held per logit while the loss of a micro-batch is computed")
    logit_dtype: Literal["fp32", "activation"] = Field(
        default="fp32", description="type of the logits: activation scales logit_bytes, those of BF16, with the recipe"
    )
    expert_weight_gradients: Literal["none", "one", "local"] = Field(
        description="experts whose weight gradients exist in the compute type at once, beside the main gradients"
    )
    allocator_reserve_frac: Sourced = Field(description="reserved over allocated device memory, minus 1")
    unmapped_reserve_frac: Sourced | None = Field(
        default=None, description="held idle over the peak where graphs are captured without expandable segments"
    )
    holds_exchanged_rows: bool = Field(
        default=False,
        description="rows of an exchange beside compute stay allocated until both streams have passed them",
    )
    recurrence_bytes: Sourced | None = Field(
        default=None,
        description="held at once by the backward of a linear mixer's recurrence, a token and channel of its output, "
        "in fp32; none: its kernels hold gradients of its inputs and output alone",
    )
    full_sharding: Literal["megatron-fsdp", "fsdp2", "fsdp2-bf16"] = Field(
        default="megatron-fsdp",
        description="fsdp2: fp32 weights are the only ones kept, with fp32 gradients; fsdp2-bf16: all state in BF16",
    )
    fsdp_unit_bytes: Sourced | None = Field(
        default=None, description="held for each parameter of one layer under full sharding: gathered, with gradients"
    )
    graph_io_rows: Sourced | None = Field(
        default=None, description="hidden states a partly graphed layer holds for each micro-batch in flight"
    )

    offload_resident_layers: PositiveInt = Field(
        default=1, description="layers whose offloaded tensors are on the device at once: leaving, used or coming back"
    )

    time: StackTime = Field(description="launches, fusions, graphs and overlap: what it adds to kernel times")
    on_cpu: dict[str, Any] = Field(default={}, description="fields that differ on a CPU, as in this file")

    @field_validator("excluded")
    @classmethod
    def _are_settings(cls, entries: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        unknown = [key for entry in entries for key in entry if key not in Point.__slots__]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no setting of a plan")
        return entries

    def on(self, device: Literal["cuda", "cpu"]) -> "SoftwareStack":
        """The stack as it runs on that kind of device. InvalidInputError where ``on_cpu`` has wrong fields."""
        if device == "cuda" or not self.on_cpu:
            return self
        table = self.model_dump(exclude={"on_cpu"}) | self.on_cpu
        table["time"] = self.time.model_dump() | self.on_cpu.get("time", {})
        return validate(SoftwareStack, table, f"stack {self.name}: on_cpu")

    def without_grouped_gemm(self) -> "SoftwareStack":
        """The same stack with a GEMM, and an activation, for each local expert: at the rate of that expert's rows."""
        time = self.time.model_copy(update={"grouped_gemm": False})
        return self.model_copy(update={"name": f"{self.name} without grouped GEMM", "time": time})

    def dispatch_backend(self, point: Point) -> DispatchBackend:
        """The back end that a point's dispatcher names."""
        return point.flex_backend if point.dispatcher == "flex" else point.dispatcher

    def failures(self, model: ModelSpec, point: Point, profile: HardwareProfile) -> Iterator[tuple[str, str]]:
        """Known failures that the point would meet on this machine, as (key, what and where it is reported)."""
        crosses = point.ep * point.etp > profile.scale_up_domain_gpus.value
        backend = self.dispatch_backend(point)
        if model.moe is not None and backend == "deepep" and crosses and profile.scale_up_domain_gpus.value < NODE_GPUS:
            found = f"{profile.name} has {profile.scale_up_domain_gpus.value:g} in one"
            yield (
                "dispatcher",
                f"DeepEP between hosts needs {NODE_GPUS} GPUs in an NVLink domain, {found}: take alltoall",
            )
        for known in self.known_failures:
            is_met = known.backend == backend and profile.name in known.hardware
            if model.moe is not None and is_met and (crosses or not known.across_domains):
                where = f"{profile.name} (NVLink domain of {profile.scale_up_domain_gpus.value:g} GPUs)"
                yield "dispatcher", f"{known.backend} with ep {point.ep} on {where}: {known.ref}"

    def refusals(self, model: ModelSpec, point: Point, profile: HardwareProfile) -> tuple[str, ...]:
        """Why the point would not run on this stack and machine: rules it breaks, known failures it meets."""
        broken = (*self.violations(model, point), *self.failures(model, point, profile))
        return tuple(f"{key}: {problem}" for key, problem in broken)

    def features_of(
        self, model: ModelSpec, profile: HardwareProfile, precision: PrecisionName, backend: DispatchBackend | None
    ) -> Features:
        """What its recipes set for plans of ``model`` on ``profile`` that do not say."""
        setting = Setting(
            model=model.name,
            is_moe=model.moe is not None,
            hardware=profile.name,
            scale_up_domain_gpus=int(profile.scale_up_domain_gpus.value),
            precision=precision,
            backend=backend,
        )
        return features(self.defaults, setting)

    def recompute_violations(self, recompute: tuple[RecomputeModule, ...]) -> Iterator[tuple[str, str]]:
        """Each module that this stack does not recompute."""
        for module in recompute:
            if module not in self.recompute:
                allowed = ", ".join(self.recompute) or "nothing"
                yield "recompute", f"stack {self.name} recomputes {allowed}, got {module}"

    def violations(self, model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
        """Each thing the point asks and this stack does not execute, as (key, what was got and what is allowed)."""
        stack = f"stack {self.name}"
        if point.precision not in self.precisions:
            yield "precision", f"{stack} runs {', '.join(self.precisions)}, got {point.precision}"
        yield from self.recompute_violations(point.recompute)
        for name in FEATURES:
            asked = point.sharding == "full" if name == "full_sharding" else getattr(point, name)
            if asked and name not in self.features:
                yield name, f"{stack} has no {name}, got {asked}"
        for entry in self.excluded:
            if all(_is_met(getattr(point, key), wanted) for key, wanted in entry.items()):
                together = " with ".join(f"{key} {getattr(point, key)}" for key in entry)
                yield next(iter(entry)), f"{stack} does not run {together}"
        yield from self._graph_violations(point)
        for axis, limit in (("pp", self.max_pp), ("vp", self.max_vp), ("cp", self.max_cp)):
            degree: int = getattr(point, axis)
            if limit is not None and degree > limit:
                yield axis, f"{stack} runs at most {axis} {limit}, got {degree}"
        if point.cp > 1 and point.cp_comm not in self.cp_comm:
            yield "cp_comm", f"{stack} runs {', '.join(self.cp_comm)}, got {point.cp_comm}"
        if not self.pads_shards:
            yield from _uneven_shards(model, point, stack)
        if model.moe is None:
            return
        if self.ep_covers_tp and point.ep < point.tp:
            yield "ep", f"{stack} refuses ep {point.ep} below tp {point.tp} for MoE models"
        backend = self.dispatch_backend(point)
        if not self.dispatchers:
            yield "model", f"{stack} has no MoE layer, {model.name} needs one"
        elif backend not in (*self.dispatchers, *self.optional_dispatchers):
            yield "dispatcher", f"{stack} has {', '.join(self.dispatchers)}, got {backend}"

    def _graph_violations(self, point: Point) -> Iterator[tuple[str, str]]:
        other = [scope for scope in point.cuda_graph if scope not in self.graph_scopes]
        if other:
            yield (
                "cuda_graph",
                f"stack {self.name} captures {', '.join(self.graph_scopes) or 'no graph'}, got {', '.join(other)}",
            )
        if point.cuda_graph and self.max_graph_gpus is not None and point.num_gpus > self.max_graph_gpus:
            most = f"{self.max_graph_gpus} GPU" + "s" * (self.max_graph_gpus > 1)
            yield "cuda_graph", f"stack {self.name} captures graphs on {most}, got {point.num_gpus}"


def _is_met(value: object, wanted: object) -> bool:
    """Whether a setting has one of the values that an exclusion names."""
    if wanted is True:
        return bool(value)
    return value in wanted if isinstance(wanted, list | tuple) else value == wanted


def _uneven_shards(model: ModelSpec, point: Point, stack: str) -> Iterator[tuple[str, str]]:
    if model.moe is not None and model.moe.mlp_bias and model.hidden_size % point.etp:
        yield "etp", f"{stack} splits biases of {model.hidden_size} evenly, got etp {point.etp}"


def stack_names() -> tuple[str, ...]:
    """Names of the stacks that come with moeplan, sorted."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in STACK_FOLDER.glob("*.toml")))


def load_stack(name_or_path: str) -> SoftwareStack:
    """The stack of that name, or of that TOML file (anything that ends in .toml).

    Raises InvalidInputError for an unknown name (with the nearest ones), and for what the schema refuses.
    """
    path = _find(name_or_path, Path())
    return validate(SoftwareStack, _read_merged(path, ()), str(path))


def _find(name_or_path: str, folder: Path) -> Path:
    """The file of a stack's name, or of a path seen from ``folder``."""
    if name_or_path.endswith(".toml"):
        return folder / name_or_path
    if name_or_path.lower() not in stack_names():
        raise InvalidInputError(
            f"unknown stack {name_or_path!r}: neither a stack of moeplan nor a .toml file",
            nearest_names(name_or_path, stack_names()),
        )
    return STACK_FOLDER / f"{name_or_path.lower()}.toml"


def _read_merged(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    """The table of a file over that of its ``base``: fields replace fields, ``time`` merges by field."""
    if path.resolve() in children:
        raise InvalidInputError(f"{path}: its base leads back to the file itself", "name a stack of moeplan as base")
    table = read_toml(path)
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise InvalidInputError(
            f"{path}: base: must be a name or a path, got {base!r}", 'base = "megatron-bridge-26.08"'
        )
    merged = _read_merged(_find(base, path.parent), (*children, path.resolve()))
    time = {**merged["time"], **table.get("time", {})}
    return {**merged, "name": path.stem, **table, "time": time}
