"""Weights, gradients and optimizer state of one parameter on one rank, and what full sharding gathers (section 1.2)."""

from typing import NamedTuple

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.point import Point
from moeplan.simulator.stack import SoftwareStack
from moeplan.units import DTYPE_BYTES
from moeplan.vocabulary import PRECISIONS

_MAIN_WEIGHT_BYTES = 4.0  # fp32
_REMAINDER_BYTES = 2.0  # the 16 bits of an fp32 weight that bf16 lacks
_PER_TENSOR = ("fp8_delayed", "fp8_current")


class StateBytes(NamedTuple):
    """Bytes one rank holds for each of its parameters."""

    weights: float
    gradients: float
    optimizer: float


def bytes_per_parameter(
    point: Point,
    *,
    is_expert: bool,
    is_quantized: bool,
    num_copies: int = 2,
    state_dtype: str | None = None,
) -> StateBytes:
    """Training state of one parameter (report section 1.2).

    The optimizer's part (main weights where the recipe has them, two moments) is split over d = dp x cp for dense
    parameters and d = edp for experts: BF16 with fp32 moments 6 + 12/d, with BF16 moments 6 + 8/d; fp32 8 + 8/d;
    FP8 with BF16 moments 8 + 8/d; FP8 moments, whose scales are left out, 6 + 6/d; remainders of main weights 2/d less.
    FP8 primary weights have no BF16 copy: 2 bytes less, block scales counted.
    Full sharding splits weights and gradients as well: 18/d. Block scales beside a BF16 copy (at most 3 %) are left
    out, as the report does. The part of the optimizer step that runs on the host holds its two moments there and
    leaves the main weights (docs of Megatron's CPU offload; published readings fall by 8 bytes a parameter).

    ``num_copies``: quantized copies of a weight, 2 where GEMMs want it by row and by column. ``state_dtype``: under
    full sharding the one type of all state (FSDP2); what is computed with is gathered in the compute type.
    """
    precision = PRECISIONS[point.precision]
    is_full = point.sharding == "full"
    shards = 1
    if point.sharding != "none":
        shards = (point.edp if is_expert else point.dp * point.cp) // point.dp_replicate
    moments = 2 * DTYPE_BYTES[point.moment_dtype] * (1 - point.optimizer_cpu_frac)
    if is_full and state_dtype is not None:
        each = DTYPE_BYTES[state_dtype] / shards
        return StateBytes(each, each, 2 * each * (1 - point.optimizer_cpu_frac))
    main = main_weight_bytes(point) if precision.has_main_weights else 0.0
    weights = precision.param_bytes
    if is_quantized:
        copies = precision.quantized_weight_bytes * num_copies / 2
        if point.fp8_primary_weights:
            weights = copies * (1 + precision.scale_frac)
        elif not is_full:  # under full sharding the copies are of gathered weights
            weights += copies
    split = shards if is_full else 1
    return StateBytes(weights / split, DTYPE_BYTES[point.grad_dtype] / split, (main + moments) / shards)


def main_weight_bytes(point: Point) -> float:
    """Bytes that the optimizer keeps of one weight: fp32, what of it bf16 lacks, or the weight itself."""
    precision = PRECISIONS[point.precision]
    if point.main_weight_remainders:
        return _REMAINDER_BYTES
    return _MAIN_WEIGHT_BYTES if precision.has_main_weights else precision.param_bytes


def adam_bytes(point: Point) -> float:
    """Bytes that a step of Adam in one pass reads and writes for one parameter.

    The gradient is read, main weight and both moments are read and written, the weight computed with is written: with
    fp32 gradients and moments 30 in BF16, 28 in fp32. Beside remainders the weight is read as well, being the other
    half of the main weight: 28.
    """
    precision = PRECISIONS[point.precision]
    copy_bytes = precision.param_bytes * precision.has_main_weights * (2 if point.main_weight_remainders else 1)
    moment_bytes = 2 * DTYPE_BYTES[point.moment_dtype]
    return DTYPE_BYTES[point.grad_dtype] + 2 * (main_weight_bytes(point) + moment_bytes) + copy_bytes


def requantize_bytes(point: Point) -> tuple[float, float]:
    """Bytes that quantizing one weight once a step moves: on ranks that update it, and on all that multiply by it.

    All read the BF16 copy and write the quantized ones. FP8 primary weights have no such copy, which Adam then does not
    write either: where a main weight is, it is read for the largest magnitude and once more to be quantized. (MXFP8's
    travel in BF16 and are quantized from that.)
    """
    precision = PRECISIONS[point.precision]
    if point.fp8_primary_weights and point.precision in (*_PER_TENSOR, "fp8_blockwise"):
        return 2 * _MAIN_WEIGHT_BYTES - precision.param_bytes, precision.quantized_weight_bytes
    is_quantized = precision.quantized_weight_bytes > 0
    return 0.0, (precision.param_bytes + precision.quantized_weight_bytes) * is_quantized


def num_weight_copies(point: Point, profile: HardwareProfile) -> int:
    """1 for per-tensor FP8 on devices whose FP8 GEMMs take either layout (those that run MXFP8), else 2.

    Report section 1.2: row and column copies on Hopper and for MXFP8, one for per-tensor scaling on Blackwell.
    """
    return 1 if point.precision in _PER_TENSOR and "mxfp8" in profile.low_precision else 2


def gathered_bytes(point: Point, stack: SoftwareStack, layer_elements: float, outside_elements: float) -> float:
    """Full sharding's buffers: of one layer, and of the embedding or head, which are no layer (report section 1.7).

    ``layer_elements``: of the largest layer after tp, etp and ep. Embedding and head are gathered once, in the
    compute type, with their gradient.
    """
    if point.sharding != "full" or stack.fsdp_unit_bytes is None:
        return 0.0
    compute_bytes = PRECISIONS[point.precision].activation_bytes
    return stack.fsdp_unit_bytes.value * layer_elements + 2 * compute_bytes * outside_elements
