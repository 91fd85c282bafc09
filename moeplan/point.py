"""A candidate plan as the planner makes them by the thousand: the axes of a Plan without the model, unchecked."""

from dataclasses import dataclass
from typing import Any

from moeplan.folding import Folding
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


@dataclass(frozen=True, slots=True)
class Point:
    """Fields as in :class:`moeplan.plan.Plan`. ``recompute`` is sorted; the layout string decides the stages."""

    num_gpus: int
    seq_len: int
    global_batch_size: int
    mbs: int
    tp: int
    cp: int
    cp_comm: CpComm
    cp_a2a_size: int
    packed_lengths: tuple[int, ...]
    pp: int
    vp: int
    etp: int
    ep: int
    layout: str
    micro_batch_group_size: int | None
    precision: PrecisionName
    recompute: tuple[RecomputeModule, ...]
    memory_efficient_permutation: bool
    dispatcher: Dispatcher
    flex_backend: FlexBackend
    sharding: Sharding
    grad_dtype: str
    moment_dtype: str
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    ep_overlap: bool
    delay_wgrad: bool
    shared_expert_overlap: bool
    dispatch_sms: int
    echo_slots: int
    paged_stash_factor: float
    routing: Routing
    cuda_graph: tuple[CudaGraphScope, ...]
    fused_grouped_mlp: bool
    permute_fusion: bool
    router_fusion: bool
    fp8_primary_weights: bool
    fp8_attention: bool
    tp_comm_overlap: bool
    offload_layers: int
    offload_modules: tuple[OffloadModule, ...]
    offload_optimizer_states: bool
    optimizer_cpu_frac: float
    dp_replicate: int = 1
    main_weight_remainders: bool = False
    paired_wgrad: tuple[ExpertMatrix, ...] = ()
    bf16_first_layers: int = 0
    bf16_last_layers: int = 0
    bf16_modules: tuple[Bf16Module, ...] = ()

    @property
    def folding(self) -> Folding:
        return Folding(self.num_gpus, tp=self.tp, cp=self.cp, pp=self.pp, etp=self.etp, ep=self.ep)

    @property
    def dp(self) -> int:
        return self.num_gpus // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.num_gpus // (self.etp * self.ep * self.pp)

    @property
    def cp_head_ranks(self) -> int:
        """Ranks of a cp group that split heads rather than the sequence during attention; the ring has cp over it."""
        return {"a2a": self.cp, "a2a+p2p": self.cp_a2a_size}.get(self.cp_comm, 1)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches each data-parallel rank runs per step."""
        return self.global_batch_size // (self.mbs * self.dp)

    @property
    def bf16_ends(self) -> tuple[int, int]:
        """Decoder layers that stay in bf16 at the start and at the end."""
        return self.bf16_first_layers, self.bf16_last_layers

    @property
    def paired_adds_frac(self) -> float:
        """Additions of a weight gradient over micro-batches where two are added at once, an odd one alone."""
        return -(-self.num_micro_batches // 2) / self.num_micro_batches

    @property
    def pairs_wait_as_tokens(self) -> bool:
        """Whether rows of experts' first matrix that wait for a micro-batch do so as the tokens they are copies of.

        They are nothing else where no rank sends any and none are dropped. In low precision rows wait as they are.
        """
        return "expert_fc1" in self.paired_wgrad and self.ep * self.etp == 1 and self.routing != "drop"

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of one micro-batch on one rank, after the tp (sequence parallel) and cp split."""
        return self.mbs * self.seq_len // (self.tp * self.cp)

    def as_dict(self) -> dict[str, Any]:
        """Field names and values: what a Plan takes beside model, hardware and stack."""
        return {name: getattr(self, name) for name in self.__slots__}
