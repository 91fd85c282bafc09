"""What a software stack adds to the time of the kernels it runs: launches, fusions, graphs, overlap."""

from pydantic import Field

from moeplan.hwprofiles.schema import Sourced
from moeplan.record import Record


class StackTime(Record):
    """The ``[time]`` table of a software stack. Every number carries its source."""

    permute_in_dispatch: bool = Field(default=False, description="hybridep writes tokens in expert order itself")
    fused_grad_accumulation: bool = Field(description="weight-gradient GEMMs add to the main gradients themselves")
    launches_per_op: Sourced = Field(description="eager kernels the host issues per op of the simulator")
    grouped_launches_per_expert: Sourced = Field(description="further ones per local expert of a grouped GEMM")
    quantized_launches_per_expert: Sourced = Field(description="the same in low precision: quantize and swizzle too")
    router_kernels: Sourced = Field(description="kernels of the router beside its GEMM, forward")
    quantize_bytes_per_element: Sourced = Field(
        description="bytes moved to quantize a GEMM's input beyond the row-wise copy that measured rates include"
    )
    loss_bytes_per_logit: Sourced = Field(
        description="bytes moved per logit by the cross entropy, forward and backward"
    )
    optimizer_efficiency_frac: Sourced = Field(description="of device memory bandwidth, reached by the Adam step")
