"""A plan: what to train and how, complete in itself."""

import hashlib
import json
import re
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from moeplan.errors import MoeplanError
from moeplan.folding import Folding
from moeplan.layout import PipelineLayout, balanced_layout
from moeplan.legality import violations
from moeplan.model_spec import ModelSpec
from moeplan.point import Point
from moeplan.record import Record
from moeplan.step_packs import dynamic_cp_violations
from moeplan.vocabulary import (
    Bf16Module,
    CpComm,
    CudaGraphScope,
    Dispatcher,
    ExpertMatrix,
    FlexBackend,
    OffloadModule,
    PrecisionName,
    RecomputeModule,
    Routing,
    Sharding,
)


class Plan(Record):
    """Everything that changes cost. ``dp`` and ``edp`` follow from the other degrees; where given they must agree.

    ``tp*cp*dp == etp*ep*edp`` ranks form one pipeline stage. Sharding ``optimizer`` splits optimizer state over
    dp x cp (dense) and edp (experts); ``full`` splits weights and gradients too (FSDP); ``none`` replicates all.
    """

    schema_version: Literal[1] = 1
    model: ModelSpec
    hardware: str
    num_gpus: PositiveInt
    stack: str = "native"
    seq_len: PositiveInt
    global_batch_size: PositiveInt
    mbs: PositiveInt = Field(default=1, description="sequences of one micro-batch")
    tp: PositiveInt = 1
    cp: PositiveInt = 1
    cp_comm: CpComm = Field(default="p2p", description="how context parallelism brings queries and keys together")
    cp_a2a_size: PositiveInt = Field(default=1, description="ranks that split heads under a2a+p2p, a divisor of cp")
    packed_lengths: tuple[PositiveInt, ...] = Field(
        default=(), description="documents that fill each sequence, none seeing another; empty: one document"
    )
    dynamic_cp: bool = Field(
        default=False, description="a cp for each pack of documents, up to dp x cp ranks, in every micro-batch"
    )
    document_lengths: tuple[PositiveInt, ...] = Field(
        default=(), description="under dynamic_cp, tokens of each document of a step, none seeing another"
    )
    max_tokens_per_rank: int = Field(
        default=0, ge=0, description="under dynamic_cp, tokens of a pack on each of its ranks; 0: mbs x seq_len / cp"
    )
    sequence_parallel: bool = Field(default=True, description="tp splits norms and residuals by tokens as well")
    pp: PositiveInt = 1
    vp: PositiveInt = 1
    etp: PositiveInt = 1
    ep: PositiveInt = 1
    dp: int = Field(default=0, ge=0, description="0: derived")
    edp: int = Field(default=0, ge=0, description="0: derived")
    layout: str = Field(default="", description="empty: balanced by rule")
    micro_batch_group_size: PositiveInt | None = Field(default=None, description="of interleaving; default pp")
    precision: PrecisionName = "bf16"
    recompute: tuple[RecomputeModule, ...] = ()
    memory_efficient_permutation: bool = True
    dispatcher: Dispatcher = "alltoall"
    flex_backend: FlexBackend = "hybridep"
    sharding: Sharding = "optimizer"
    dp_replicate: PositiveInt = Field(
        default=1, description="blocks of a stage's ranks with a copy each of the sharded state (HSDP)"
    )
    grad_dtype: Literal["fp64", "fp32", "bf16"] = "fp32"
    moment_dtype: Literal["fp64", "fp32", "bf16", "fp8"] = "fp32"
    main_weight_remainders: bool = Field(
        default=False, description="main weights keep only the 16 bits that their bf16 weights lack"
    )
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    ep_overlap: bool = Field(default=False, description="a forward and a backward run together to hide the exchange")
    delay_wgrad: bool = Field(default=False, description="under ep_overlap, weight gradients wait for their own step")
    paired_wgrad: tuple[ExpertMatrix, ...] = Field(
        default=(), description="experts' matrices whose weight gradients two micro-batches add at once"
    )
    shared_expert_overlap: bool = Field(default=False, description="shared experts run beside the exchange")
    dispatch_sms: int = Field(default=0, ge=0, description="SMs given to the flex dispatcher; 0: its default")
    echo_slots: int = Field(default=0, ge=0, description="spare slots a rank for clones of hot experts (ECHO); 0: none")
    paged_stash_factor: float = Field(
        default=0.0, ge=0, description="pages for kept rows of experts over the balanced need; 0: no paged stash"
    )
    routing: Routing = Field(
        default="balanced", description="load, balanced or natural; drop: at most model.moe.router.capacity_factor"
    )
    cuda_graph: tuple[CudaGraphScope, ...] = Field(default=(), description="parts whose kernels a graph launches")
    fused_grouped_mlp: bool = Field(default=False, description="activation and quantize inside the grouped GEMMs")
    permute_fusion: bool = Field(default=True, description="one kernel gathers tokens by expert")
    router_fusion: bool = Field(default=True, description="scores, top-k and auxiliary loss in three kernels")
    fp8_primary_weights: bool = Field(default=False, description="no BF16 copy: weights live and travel in FP8")
    fp8_attention: bool = False
    bf16_first_layers: int = Field(default=0, ge=0, description="decoder layers kept out of low precision at the start")
    bf16_last_layers: int = Field(default=0, ge=0, description="the same at the end")
    bf16_modules: tuple[Bf16Module, ...] = Field(
        default=(), description="linears kept in bf16 under low precision (linear_out in MXFP8 under NVFP4)"
    )
    tp_comm_overlap: bool = False
    offload_layers: int = Field(default=0, ge=0, description="layers of a rank whose kept tensors go to the host")
    offload_modules: tuple[OffloadModule, ...] = Field(
        default=(), description="modules whose kept inputs go to the host"
    )
    offload_optimizer_states: bool = Field(default=False, description="on the host outside the optimizer step")
    optimizer_cpu_frac: float = Field(default=0.0, ge=0, le=1, description="part of the optimizer step run on the host")

    @model_validator(mode="after")
    def _legal(self) -> Self:
        try:
            folding = self.folding
            for degree, derived in (("dp", folding.dp), ("edp", folding.edp)):
                given = getattr(self, degree)
                if given not in (0, derived):
                    raise ValueError(
                        f"{degree} {given} does not multiply out to {self.num_gpus} GPUs, allowed: {derived}"
                    )
                object.__setattr__(self, degree, derived)
            for key, problem in violations(self.model, self._unchecked_point()):
                raise ValueError(f"{key}: {problem}")
            for key, problem in dynamic_cp_violations(self):
                raise ValueError(f"{key}: {problem}")
            if self.tp > 1 and not self.sequence_parallel:
                who = "MoE layers" if self.model.moe else "predictions"
                raise ValueError(f"sequence_parallel: {who} under tp {self.tp} need it, got False")
            num_stages = self.pp * self.vp
            if self.layout:
                parsed = PipelineLayout.from_string(self.layout)
                parsed.check(self.model, num_stages)
                object.__setattr__(self, "layout", parsed.text)
            else:
                object.__setattr__(self, "layout", balanced_layout(self.model, num_stages).text)
        except MoeplanError as error:
            raise ValueError(error.message) from None
        for name in ("recompute", "cuda_graph", "offload_modules", "paired_wgrad", "bf16_modules"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        return self

    @cached_property
    def folding(self) -> Folding:
        """Both rank grids. Raises InvalidInputError where the degrees do not multiply out."""
        return Folding(self.num_gpus, tp=self.tp, cp=self.cp, pp=self.pp, etp=self.etp, ep=self.ep)

    @cached_property
    def pipeline(self) -> PipelineLayout:
        return PipelineLayout.from_string(self.layout)

    def _unchecked_point(self) -> Point:
        return Point(**{name: getattr(self, name) for name in Point.__slots__})

    @cached_property
    def point(self) -> Point:
        """The plan without model, hardware and stack, as the simulator's cost functions take it."""
        return self._unchecked_point()

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches each data-parallel rank runs per step."""
        return self.point.num_micro_batches

    @property
    def documents(self) -> tuple[int, ...]:
        """Lengths of the documents of each sequence: one of ``seq_len`` tokens where nothing is packed."""
        return self.packed_lengths or (self.seq_len,)

    @property
    def flop_lengths(self) -> tuple[int, ...]:
        """Lengths of documents in the proportions that attention's FLOPs depend on; empty: whole sequences."""
        return self.document_lengths or self.packed_lengths

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of one micro-batch on one rank, after the tp (sequence parallel) and cp split."""
        return self.point.tokens_per_rank

    def replace(self, **changes: Any) -> "Plan":
        """A new, checked plan; degrees that follow from others, and the layout, are derived again unless given."""
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in ("dp", "edp", "layout")}
        return type(self).model_validate(fields | changes)

    @cached_property
    def plan_id(self) -> str:
        """12 hex digits of the canonical form: schema version plus the fields that differ from their defaults.

        A profile or a stack of one's own counts by its file's name, wherever it lies.
        """
        canonical: dict[str, Any] = self.model_dump(mode="json", exclude_defaults=True, exclude={"model": {"source"}})
        for key in {"hardware", "stack"} & canonical.keys():
            canonical[key] = re.sub(r"^(?:.*/)?([^/]+)\.toml$", r"\1", canonical[key])
        canonical["schema_version"] = self.schema_version
        text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]
