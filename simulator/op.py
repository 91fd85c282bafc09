"""What a training step is made of: operations with their work, what they cost, and when they ran.

Plain frozen dataclasses: they are made by the thousand. An op's work is counted on one rank for one micro-batch.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from moeplan.hwprofiles.schema import SourceKind
from moeplan.vocabulary import OpFamily, RecomputeModule

OpKind = Literal[
    "gemm",
    "grouped_gemm",
    "attention",
    "memory",
    "gather",
    "exchange",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "send_recv",
]
OP_KINDS: tuple[OpKind, ...] = get_args(OpKind)
Phase = Literal["fwd", "dgrad", "wgrad", "none"]
Bound = Literal["compute", "hbm", "network", "latency", "host"]
Stream = Literal["compute", "dispatch", "tp", "cp"]
# Where an op stands in the layer-pair schedule of expert-parallel overlap (report section 2.5).
Segment = Literal["before", "dispatch", "expert", "combine", "after"]
GraphScope = Literal["attention", "mamba", "router", "moe", "mlp", "outside"]


@dataclass(frozen=True, slots=True)
class Placement:
    """How one group of ranks lies over scale-up domains: the worst group of its axis."""

    num_ranks: int = 1
    num_domains: int = 1

    @property
    def ranks_per_domain(self) -> float:
        """Mean number of its ranks inside one scale-up domain."""
        return self.num_ranks / self.num_domains


ALONE = Placement()


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one rank. Which work fields count depends on ``kind``; the others are 0.

    gemm: ``rows`` x ``inner`` times ``inner`` x ``cols``, ``num_groups`` of them (grouped_gemm: the local
    experts), at ``rate_frac`` of the machine's dense rate (grouped_gemm: where it has no curve of ``backend``).
    attention: ``rows`` tokens x ``cols`` heads against ``seq_len`` keys, causal, at ``rate_frac`` of the machine's
    readings. memory, gather: ``hbm_bytes`` moved; backward in ``backward_num_kernels``, 0: as many as forward;
    no faster than ``most_bytes_per_s``, 0: than memory.
    ``epilogue_hbm_bytes``: moved after the products of a GEMM are done. ``adds_fp32``: those are additions to fp32
    main gradients, for ``paired_frac`` of the micro-batches two at a time.
    Collectives: ``comm_bytes`` in the convention of CollectiveCurve, in ``num_messages`` equal ones, one after another.
    ``repeats``: not kept, so backward does it again first. exchange: ``comm_bytes`` to other ranks inside
    the scale-up domain, ``network_bytes`` to other domains, of both the ``forward_`` part forward alone; ``wait_s``
    until all its ranks have come.
    """

    name: str
    kind: OpKind
    family: OpFamily
    phase: Phase = "fwd"
    stream: Stream = "compute"
    segment: Segment = "before"
    scope: GraphScope = "attention"
    dtype: str = "bf16"
    rows: float = 0.0
    cols: float = 0.0
    inner: float = 0.0
    num_groups: int = 1
    seq_len: float = 0.0
    qk_head_dim: int = 0
    v_head_dim: int = 0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    backward_hbm_bytes: float = 0.0
    most_bytes_per_s: float = 0.0
    epilogue_hbm_bytes: float = 0.0
    adds_fp32: bool = False
    paired_frac: float = 0.0
    comm_bytes: float = 0.0
    network_bytes: float = 0.0
    forward_comm_bytes: float = 0.0
    forward_network_bytes: float = 0.0
    wait_s: float = 0.0
    backend: str = ""
    rate_frac: float = 1.0
    group: Placement = ALONE
    num_kernels: float = 1.0
    backward_num_kernels: float = 0.0
    num_messages: int = 1
    repeats: bool = False
    modules: frozenset[RecomputeModule] = field(default_factory=frozenset)
    after: tuple[str, ...] | None = None
    """Names of the ops it waits for; None: the one before it in program order."""

    @property
    def stops_host(self) -> bool:
        """Whether the host can issue nothing more until it is done: a forward's dispatch tells the counts of tokens."""
        return self.kind == "exchange" and self.segment == "dispatch" and self.phase == "fwd"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one op on an otherwise idle rank. ``note`` says which entry was assumed, if one was."""

    seconds: float
    bound: Bound
    source: SourceKind
    error_frac: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class OpRun:
    """An op with its cost and its place in the phase."""

    op: Op
    cost: Cost
    start_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.cost.seconds


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work on one stream of one pipeline rank."""

    rank: int
    stream: str
    op: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All spans of one step, by rank and start."""

    spans: tuple[Span, ...]

    @property
    def end_s(self) -> float:
        """When the last span ends."""
        return max((span.end_s for span in self.spans), default=0.0)
