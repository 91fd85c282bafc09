"""What a software stack adds to the time of the kernels it runs: launches, fusions, graphs, overlap."""

from pydantic import Field

from moeplan.hwprofiles.schema import Sourced
from moeplan.record import Record
from moeplan.vocabulary import PrecisionName


class StackTime(Record):
    """The ``[time]`` table of a software stack. Every number carries its source."""

    permute_in_dispatch: bool = Field(default=False, description="hybridep writes tokens in expert order itself")
    grouped_gemm: bool = Field(default=True, description="False: local experts run one after another, kernel by kernel")
    fused_grad_accumulation: bool = Field(description="weight-gradient GEMMs add to the main gradients themselves")
    zeroes_main_grads: bool = Field(default=True, description="a pass of its own clears main gradients before a step")
    trains_adapters: bool = Field(
        default=False,
        description="weights are frozen (LoRA): no weight gradients and no optimizer; adapters count as nothing",
    )
    splits_mtp_projection: bool = Field(
        default=True, description="tp splits the projection of an MTP depth by columns; False: whole on every rank"
    )
    grouped_gemm_frac: Sourced = Field(
        description="rate of grouped GEMMs started one expert at a time over the dense one, where no curve is measured"
    )
    device_grouped_gemm_frac: Sourced = Field(description="the same of one kernel that reads shapes on the device")
    elementwise_factor: Sourced = Field(description="bytes element-wise kernels move over those of ideal fusion")
    scan_bytes_per_s: Sourced | None = Field(
        default=None,
        description="most that kernels of a linear mixer move, on any machine; none: what memory gives",
    )
    repeats_scans: bool = Field(
        default=False, description="convolution, recurrence and gated norm of linear mixers run again before backward"
    )
    permute_factor: Sourced = Field(description="bytes permutations move over one read and one write of each copy")
    unfused_permute_factor: Sourced = Field(description="the same of index and scatter kernels instead of one")
    stop_launches: Sourced = Field(
        description="host work of a dispatch that stopped it, before the next kernel: as many eager ops"
    )
    gemm_frac: Sourced = Field(description="rate of GEMMs over the machine's readings")
    fp8_gemm_frac: Sourced = Field(description="the same of per-tensor FP8, whose readings are of the best shapes")
    fp8_block_gemm_frac: Sourced | None = Field(default=None, description="the same of FP8 in blocks; none: 1")
    flash_attention_frac: Sourced | None = Field(
        default=None,
        description="rate of attention before Blackwell over the readings, which are of cuDNN; none: cuDNN",
    )
    hides_cp: bool = Field(default=True, description="keys and values pass beside the attention they are not needed by")
    exchange_wait_s: Sourced = Field(description="host-driven exchange: wait for the last rank, per doubling of ranks")
    exchange_contention_frac: Sourced = Field(
        description="rate that compute loses beside an exchange, beyond its SMs: memory, power, order of launches"
    )
    choice_spread_frac: Sourced = Field(
        description="standard deviation over experts of the probability that a token chooses one, natural routing"
    )
    jitter_frac: Sourced = Field(description="host-driven runs: slowest rank over the mean, per doubling of GPUs")
    launches_per_op: Sourced = Field(description="eager kernels the host issues per op of the simulator")
    grouped_launches_per_expert: Sourced = Field(description="further ones per local expert of a grouped GEMM")
    quantized_launches_per_expert: Sourced = Field(description="the same in low precision: quantize and swizzle too")
    router_kernels: Sourced = Field(description="kernels of the router beside its GEMM, forward")
    quantize_bytes_per_element: dict[PrecisionName, Sourced] = Field(
        default={}, description="by recipe: bytes moved to quantize a GEMM's input, beyond what measured rates include"
    )
    norm_quantizes: tuple[PrecisionName, ...] = Field(
        default=(), description="recipes in which a norm writes the quantized copies in the place of its output"
    )
    copies_quantize: tuple[PrecisionName, ...] = Field(
        default=(),
        description="recipes in which a rank that holds all experts quantizes tokens, and gradients of their sums, as "
        "it copies them: no copy is written in bf16",
    )
    loss_bytes_per_logit: Sourced = Field(
        description="bytes moved per logit by the cross entropy, forward and backward"
    )
    kernel_gap_s: Sourced | None = Field(
        default=None, description="a GPU's pause between a kernel and the next one, where no graph holds them"
    )
    step_host_s: Sourced | None = Field(
        default=None, description="a GPU's wait for the host once a step: data, the figures it reads back, the update"
    )
    optimizer_efficiency_frac: Sourced = Field(description="of device memory bandwidth, reached by the Adam step")
