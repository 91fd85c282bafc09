"""Software stacks: which engine and release executes a plan, what it can run, and what it keeps in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from moeplan.errors import InvalidInputError, nearest_names
from moeplan.files import read_toml, validate
from moeplan.hwprofiles.schema import DispatchBackend, Sourced
from moeplan.model_spec import ModelSpec
from moeplan.point import Point
from moeplan.record import Record
from moeplan.simulator.stack_time import StackTime
from moeplan.vocabulary import PrecisionName, RecomputeModule

STACK_FOLDER = Path(__file__).parent / "stacks"

SavedTensorTable = Literal["megatron", "native", "korthikanti-2022"]


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
    recompute: tuple[RecomputeModule, ...]
    max_pp: PositiveInt | None = None
    max_vp: PositiveInt | None = None
    max_cp: PositiveInt | None = None
    grouped_gemm_backend: str = Field(description="name of the grouped GEMM curves of a hardware profile to use")

    # What it keeps in memory
    saved_tensors: SavedTensorTable = Field(description="table of tensors kept for backward, in activations.py")
    fused_attention: bool = Field(description="False: the score matrix is kept")
    fused_cross_entropy: bool
    logit_bytes: Sourced = Field(description="bytes held per logit while the loss of a micro-batch is computed")
    expert_weight_gradients: Literal["one", "local"] = Field(
        description="experts whose weight gradients exist in the compute type at once, beside the main gradients"
    )
    allocator_reserve_frac: Sourced = Field(description="reserved over allocated device memory, minus 1")

    time: StackTime = Field(description="launches, fusions, graphs and overlap: what it adds to kernel times")

    def dispatch_backend(self, point: Point) -> DispatchBackend:
        """The back end that a point's dispatcher names."""
        return "alltoall" if point.dispatcher == "alltoall" else point.flex_backend

    def violations(self, model: ModelSpec, point: Point) -> Iterator[tuple[str, str]]:
        """Each thing the point asks and this stack does not execute, as (key, what was got and what is allowed)."""
        stack = f"stack {self.name}"
        if point.precision not in self.precisions:
            yield "precision", f"{stack} runs {', '.join(self.precisions)}, got {point.precision}"
        for module in point.recompute:
            if module not in self.recompute:
                yield "recompute", f"{stack} recomputes {', '.join(self.recompute) or 'nothing'}, got {module}"
        for axis, limit in (("pp", self.max_pp), ("vp", self.max_vp), ("cp", self.max_cp)):
            degree: int = getattr(point, axis)
            if limit is not None and degree > limit:
                yield axis, f"{stack} runs at most {axis} {limit}, got {degree}"
        if model.moe is None:
            return
        backend = self.dispatch_backend(point)
        if not self.dispatchers:
            yield "model", f"{stack} has no MoE layer, {model.name} needs one"
        elif backend not in self.dispatchers:
            yield "dispatcher", f"{stack} has {', '.join(self.dispatchers)}, got {backend}"


def stack_names() -> tuple[str, ...]:
    """Names of the stacks that come with moeplan, sorted."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in STACK_FOLDER.glob("*.toml")))


def load_stack(name_or_path: str) -> SoftwareStack:
    """The stack of that name, or of that TOML file (anything that ends in .toml).

    Raises InvalidInputError for an unknown name (with the nearest ones), and for what the schema refuses.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        if name_or_path.lower() not in stack_names():
            raise InvalidInputError(
                f"unknown stack {name_or_path!r}: neither a stack of moeplan nor a .toml file",
                nearest_names(name_or_path, stack_names()),
            )
        path = STACK_FOLDER / f"{name_or_path.lower()}.toml"
    return validate(SoftwareStack, read_toml(path), str(path))
