"""What the ops of a layer depend on, and nothing else: the key under which their costs are kept."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from moeplan.hwprofiles.schema import DispatchBackend, HardwareProfile
from moeplan.model_spec import LayerKind, Moe
from moeplan.point import Point
from moeplan.simulator.op import Placement
from moeplan.simulator.rank_groups import rank_groups
from moeplan.simulator.stack import SoftwareStack
from moeplan.units import DTYPE_BYTES
from moeplan.vocabulary import (
    PRECISIONS,
    Bf16Module,
    CpComm,
    CudaGraphScope,
    ExpertMatrix,
    Precision,
    PrecisionName,
    RecomputeModule,
    Routing,
)

PartKind = LayerKind | Literal["embedding", "mtp", "loss"]


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of thing a stage holds. ``layer`` is any decoder layer like it: windowed ones differ from others."""

    kind: PartKind
    layer: int = 0

    @property
    def layer_kind(self) -> LayerKind | None:
        """Its blocks, if it is a layer."""
        return self.kind if isinstance(self.kind, LayerKind) else None

    @property
    def label(self) -> str:
        """The name in reports."""
        return self.kind.label if isinstance(self.kind, LayerKind) else self.kind


@dataclass(frozen=True, slots=True)
class OpShape:
    """Sizes of one micro-batch on one rank."""

    mbs: int
    seq_len: int
    tp: int
    cp: int
    cp_comm: CpComm
    cp_head_ranks: int
    packed_lengths: tuple[int, ...]
    etp: int
    ep: int
    precision: PrecisionName
    recompute: tuple[RecomputeModule, ...]
    grad_dtype: str
    backend: DispatchBackend
    shared_expert_overlap: bool
    dispatch_sms: int
    echo_slots: int
    paged_stash: bool
    paired_wgrad: tuple[ExpertMatrix, ...]
    paired_adds_frac: float
    pairs_wait_as_tokens: bool
    routing: Routing
    copies_quantize: bool
    grouped_gemm_backend: str
    cuda_graph: tuple[CudaGraphScope, ...]
    fused_grouped_mlp: bool
    permute_fusion: bool
    router_fusion: bool
    fp8_attention: bool
    bf16_modules: tuple[Bf16Module, ...]
    attention_frac: float
    tp_comm_overlap: bool
    tp_group: Placement
    cp_group: Placement
    cp_heads_group: Placement
    cp_ring_group: Placement
    ep_group: Placement
    etp_group: Placement
    etp_ep_group: Placement

    @classmethod
    def of(cls, point: Point, stack: SoftwareStack, profile: HardwareProfile) -> "OpShape":
        """The shape of a plan's ops."""
        groups = rank_groups(point, profile)
        return cls(
            mbs=point.mbs,
            seq_len=point.seq_len,
            tp=point.tp,
            cp=point.cp,
            cp_comm=point.cp_comm,
            cp_head_ranks=point.cp_head_ranks,
            packed_lengths=point.packed_lengths,
            etp=point.etp,
            ep=point.ep,
            precision=point.precision,
            recompute=point.recompute,
            grad_dtype=point.grad_dtype,
            backend=stack.dispatch_backend(point),
            shared_expert_overlap=point.shared_expert_overlap,
            dispatch_sms=point.dispatch_sms,
            echo_slots=point.echo_slots,
            paged_stash=point.paged_stash_factor > 0,
            paired_wgrad=point.paired_wgrad,
            pairs_wait_as_tokens=point.pairs_wait_as_tokens,
            paired_adds_frac=point.paired_adds_frac if point.paired_wgrad else 1.0,
            routing=point.routing,
            copies_quantize=_copies_quantize(point, stack),
            grouped_gemm_backend=_grouped_gemm_backend(point, stack, profile),
            cuda_graph=point.cuda_graph,
            fused_grouped_mlp=point.fused_grouped_mlp,
            permute_fusion=point.permute_fusion,
            router_fusion=point.router_fusion,
            fp8_attention=point.fp8_attention,
            bf16_modules=point.bf16_modules,
            attention_frac=_attention_frac(stack, profile),
            tp_comm_overlap=point.tp_comm_overlap,
            tp_group=groups.tp,
            cp_group=groups.cp,
            cp_heads_group=groups.cp_heads,
            cp_ring_group=groups.cp_ring,
            ep_group=groups.ep,
            etp_group=groups.etp,
            etp_ep_group=groups.etp_ep,
        )

    def of_layer(self, part: Part) -> "OpShape":
        """The shape of one part's ops: a layer that stays in bf16 knows no low precision."""
        if part.layer_kind is None or not part.layer_kind.is_bf16:
            return self
        return replace(self, precision="bf16", copies_quantize=False, fp8_attention=False, bf16_modules=())

    @property
    def format(self) -> Precision:
        """Storage and arithmetic of the plan's precision."""
        return PRECISIONS[self.precision]

    @property
    def plain_dtype(self) -> str:
        """Format of what stays unquantized: attention core, head, router (report section 5.2)."""
        return "bf16" if self.format.quantized_bytes is not None else self.format.gemm_dtype

    @property
    def element_bytes(self) -> float:
        """Bytes of an activation element outside quantized GEMMs."""
        return self.format.activation_bytes

    @property
    def grad_bytes(self) -> float:
        return DTYPE_BYTES[self.grad_dtype]

    @property
    def gathered_tokens(self) -> float:
        """Tokens of one rank inside tensor-parallel regions: the sequence of its tp group."""
        return self.mbs * self.seq_len / self.cp

    @property
    def own_tokens(self) -> float:
        """Tokens of one rank outside tensor-parallel regions (sequence parallel)."""
        return self.gathered_tokens / self.tp

    @property
    def is_device_driven(self) -> bool:
        """Whether the device alone decides shapes: nothing waits for the host, which only starts one graph."""
        return "full_iteration" in self.cuda_graph

    def expert_rows(self, moe: Moe) -> float:
        """Rows of one local expert under balance, T K EP ETP / E, padded to the precision's alignment."""
        rows = self.own_tokens * moe.top_k * self.ep * self.etp / moe.num_experts
        return ceil(rows / self.format.alignment) * self.format.alignment


def _grouped_gemm_backend(point: Point, stack: SoftwareStack, profile: HardwareProfile) -> str:
    """Whose grouped GEMM curves are those of a plan: faster kernels' where a bf16 plan may run them."""
    whole = stack.whole_experts_backend
    is_read = any((curve.backend, curve.dtype) == (whole, "bf16") for curve in profile.grouped_gemm)
    if whole and is_read and point.precision == "bf16" and point.ep == 1 and not point.cuda_graph:
        return whole
    return stack.grouped_gemm_backend


def _copies_quantize(point: Point, stack: SoftwareStack) -> bool:
    """Whether nothing travels or is dropped, and experts weigh their outputs themselves, in a recipe that does it."""
    is_alone = point.ep * point.etp == 1 and point.routing != "drop" and point.memory_efficient_permutation
    return is_alone and point.precision in stack.time.copies_quantize


def _attention_frac(stack: SoftwareStack, profile: HardwareProfile) -> float:
    """Rate of the stack's attention kernel over the machine's readings, which are of cuDNN."""
    older = stack.time.flash_attention_frac
    runs_older = older is not None and profile.device == "cuda" and not profile.overlaps_gemm_epilogue
    return older.value if older is not None and runs_older else 1.0
