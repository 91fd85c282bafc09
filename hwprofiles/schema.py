"""What a hardware profile holds. Every number carries the kind of its source and a reference.

Units: bytes, seconds, FLOP/s (dense), bytes/s per direction and per GPU.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from moeplan.hwprofiles.curves import MonotoneTime
from moeplan.record import Record

SourceKind = Literal["datasheet", "measured", "fitted", "assumed"]
Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp8", "fp8_block", "mxfp8", "nvfp4"]
GroupedGemmPhase = Literal["fwd", "dgrad", "wgrad", "wgrad_of_two"]
Tier = Literal["scale_up", "network"]  # scale_up: the NVLink domain (one host for CPU profiles); network: NIC to NIC
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
DispatchBackend = Literal["alltoall", "allgather", "deepep", "hybridep", "torch"]

# Half width of the error bar a figure carries, by the kind of its source, where the profile states none. Rules of
# thumb: datasheet peaks are reached to about 10 %, repeated readings agree to about 5 %, an assumed value is a guess.
DEFAULT_ERROR_FRAC: dict[str, float] = {"datasheet": 0.10, "measured": 0.05, "fitted": 0.10, "assumed": 0.30}


class Provenance(Record):
    """Where a figure comes from."""

    source: SourceKind
    ref: str = Field(min_length=3)
    error_frac: float | None = Field(default=None, ge=0, le=1)

    @property
    def error_bar_frac(self) -> float:
        """The stated half width of the error bar, or the default of the source kind."""
        return DEFAULT_ERROR_FRAC[self.source] if self.error_frac is None else self.error_frac


class Sourced(Provenance):
    """One number; ``low`` and ``high`` where sources give a range."""

    value: float = Field(ge=0)
    low: float | None = None
    high: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_bare_number(cls, data: Any) -> Any:
        if isinstance(data, int | float):
            # ValueError, because pydantic reports only that as an invalid value.
            raise ValueError(  # noqa: TRY004
                'a bare number has no source; write { value = ..., source = "measured", ref = "..." }'
            )
        return data

    @model_validator(mode="after")
    def _value_in_range(self) -> Self:
        if (self.low is not None and self.low > self.value) or (self.high is not None and self.high < self.value):
            raise ValueError(f"value {self.value:g} lies outside low {self.low} to high {self.high}")
        return self


def _above_zero(number: Sourced) -> Sourced:
    if number.value <= 0:
        raise ValueError("value must be above 0")
    return number


def _fraction(number: Sourced) -> Sourced:
    if not 0 < number.value <= 1:
        raise ValueError("value must be above 0 and at most 1")
    return number


def _whole(number: Sourced) -> Sourced:
    if number.value < 1 or number.value != int(number.value):
        raise ValueError("value must be a whole number of at least 1")
    return number


Positive = Annotated[Sourced, AfterValidator(_above_zero)]  # rates and sizes that costs divide by
Fraction = Annotated[Sourced, AfterValidator(_fraction)]
Count = Annotated[Sourced, AfterValidator(_whole)]


class GemmCurve(Provenance):
    """Dense GEMM rate by rows M (tokens), median over wide N and K. FLOP/s.

    ``typical_inner`` is the K of the readings and ``inner_overhead`` what K pays for filling and draining: the rate
    goes with K / (K + inner_overhead). None: as the GPU readings have it.
    """

    dtype: Dtype
    typical_inner: float | None = Field(default=None, gt=0)
    inner_overhead: float | None = Field(default=None, ge=0)
    rows: tuple[float, ...] = Field(min_length=1)
    flops_per_s: tuple[float, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _table_is_sound(self) -> Self:
        _check_table(self.rows, self.flops_per_s)
        return self

    @cached_property
    def curve(self) -> MonotoneTime:
        return MonotoneTime.from_rates(self.rows, self.flops_per_s)


class GroupedGemmCurve(GemmCurve):
    """Grouped GEMM rate by rows M per expert, all local experts in one call. FLOP/s.

    ``backend`` is the kernel (torch, te, cutlass, deepgemm, ...). The readings were taken at ``num_experts`` local
    experts of ``hidden_size`` x ``expert_ffn_size``; None where they mix shapes.

    ``phase`` None: of all three passes. ``wgrad`` and ``wgrad_of_two`` hold, beside the products, what adds them to
    fp32 main gradients: for each micro-batch, and for two at once (rows are those of one, FLOP count both).
    """

    backend: str
    phase: GroupedGemmPhase | None = None
    num_experts: int | None = None
    hidden_size: int | None = None
    expert_ffn_size: int | None = None


class AttentionCurve(Provenance):
    """Causal attention core rate by sequence length, FLOP/s with causal attention halved.

    Forward counts its 2 GEMMs, backward all 5 (2.5 x the forward FLOPs where query and value heads are alike).
    """

    dtype: Dtype
    phase: Literal["fwd", "bwd"]
    qk_head_dim: int
    v_head_dim: int
    seq_len: tuple[float, ...] = Field(min_length=1)
    flops_per_s: tuple[float, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _table_is_sound(self) -> Self:
        _check_table(self.seq_len, self.flops_per_s)
        return self

    @cached_property
    def curve(self) -> MonotoneTime:
        return MonotoneTime.from_rates(self.seq_len, self.flops_per_s)


class CollectiveCurve(Provenance):
    """Seconds of one collective by message bytes over ``num_ranks`` ranks inside one tier.

    Message bytes: all_reduce the buffer of a rank; all_gather and reduce_scatter the full (gathered) buffer;
    all_to_all what a rank holds to send, its own part included; send_recv the bytes one rank sends.
    """

    collective: CollectiveKind
    tier: Tier
    num_ranks: int = Field(ge=2)
    message_bytes: tuple[float, ...] = Field(min_length=1)
    seconds: tuple[float, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _table_is_sound(self) -> Self:
        _check_table(self.message_bytes, self.seconds)
        return self

    @cached_property
    def curve(self) -> MonotoneTime:
        return MonotoneTime.from_times(self.message_bytes, self.seconds)


class DispatchRate(Record):
    """Effective rate of an expert-parallel exchange: seconds = latency_s + bytes sent / bytes_per_s_per_gpu.

    Bytes sent by one rank: K copies for alltoall; one copy per distinct rank (scale_up) or distinct scale-up domain
    (network) for deepep and hybridep.
    """

    backend: DispatchBackend
    tier: Tier
    bytes_per_s_per_gpu: Positive
    latency_s: Sourced
    num_sms: int = 0


class HardwareProfile(Record):
    """One kind of machine. Scalars are per GPU (per process for a CPU host)."""

    schema_version: Literal[1] = 1
    name: str
    description: str
    device: Literal["cuda", "cpu"]
    low_precision: tuple[str, ...] = Field(default=(), description="precision recipes the device can execute")
    scale_up_domain_gpus: Count
    peak_flops_per_s: dict[Dtype, Positive]
    memory_bytes: Positive
    framework_overhead_bytes: Sourced = Field(description="device memory held before the first tensor: context, NCCL")
    hbm_bytes_per_s: Positive
    hbm_efficiency_frac: Fraction = Field(description="of peak, for long contiguous kernels")
    gather_efficiency_frac: Fraction = Field(description="of peak, for permutation by row")
    scale_up_bytes_per_s_per_dir_per_gpu: Positive
    network_bytes_per_s_per_dir_per_gpu: Positive
    network_oversubscription: Positive | None = Field(
        default=None, description="bandwidth of the hosts below a leaf switch over that above it; None: 1"
    )
    host_link_bytes_per_s_per_dir_per_gpu: Positive
    launch_s: Sourced = Field(description="host time to issue one eager kernel")
    kernel_floor_s: Sourced = Field(description="shortest time of a kernel on the device")
    sustained_frac: Fraction = Field(description="rate under the power limit over a burst reading of the same GEMM")
    allocator_reserve_frac: Sourced | None = Field(
        default=None, description="held beyond live activations and buffers, over those; None: the stack's figure"
    )
    overlaps_gemm_epilogue: bool = Field(
        default=False, description="outputs of one tile are written while the next is computed: two accumulators fit"
    )
    num_sms: Sourced | None = None
    power_watts: Sourced | None = None
    price_usd_per_gpu_hour: Sourced | None = None
    mtbf_gpu_hours: Sourced | None = None
    host_memory_bytes_per_gpu: Sourced | None = None
    host_memory_bytes_per_s_per_gpu: Positive | None = Field(
        default=None, description="peak of host memory over the GPUs of a host; None: no more than the host link"
    )
    gemm: tuple[GemmCurve, ...] = ()
    grouped_gemm: tuple[GroupedGemmCurve, ...] = ()
    attention: tuple[AttentionCurve, ...] = ()
    collectives: tuple[CollectiveCurve, ...] = ()
    dispatch: tuple[DispatchRate, ...] = ()


def _check_table(sizes: Sequence[float], readings: Sequence[float]) -> None:
    if len(sizes) != len(readings):
        raise ValueError(f"{len(sizes)} sizes but {len(readings)} readings")
    if min(*sizes, *readings) <= 0:
        raise ValueError("sizes and readings must be above 0")
    if len(set(sizes)) < len(sizes):
        raise ValueError("a size is given twice")
