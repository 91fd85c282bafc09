"""Once a step: gradient reduction, parameter gathering, the optimizer, and what hides behind compute.

Rules. Gradients of a rank are reduce-scattered (fp32 or bf16, as ``grad_dtype``) over dp x cp for dense parameters
and over edp for experts; parameters are gathered in the compute copy's bytes. With overlap, reduction runs during the
backward of the last micro-batches (one; interleaved, a group of pp pass every virtual stage) and gathering during the
forward of the first; one bucket of ``num_chunks`` (the part
of a rank's layers that is last to be done) can never hide. Without sharding the gradients are all-reduced instead.
Hybrid sharding reduces and gathers inside blocks of ranks and all-reduces the shards over the blocks once a step.
"""

from dataclasses import dataclass

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.model_spec import ModelSpec
from moeplan.point import Point
from moeplan.simulator.collectives import collective_cost
from moeplan.simulator.offload import host_adam_s, states_back_s
from moeplan.simulator.op import Cost
from moeplan.simulator.placement import rank_parameters
from moeplan.simulator.rank_groups import shard_groups
from moeplan.simulator.stack_time import StackTime
from moeplan.simulator.training_state import adam_bytes, main_weight_bytes, requantize_bytes
from moeplan.units import DTYPE_BYTES
from moeplan.vocabulary import PRECISIONS

# NCCL's rings take 8 to 32 SMs (report section 1.7) of 132 to 152.
COLLECTIVE_SM_FRAC = 0.12


@dataclass(frozen=True, slots=True)
class StepEnds:
    """Seconds of one pipeline rank outside its chunks: gradient reduction, parameter gathering, optimizer."""

    reduce_s: float
    gather_s: float
    optimizer_s: float
    costs: tuple[Cost, ...]


def step_ends(model: ModelSpec, point: Point, stack: StackTime, profile: HardwareProfile) -> tuple[StepEnds, ...]:
    """For every pipeline rank. Adam takes the bytes of :func:`adam_bytes`, quantizing :func:`requantize_bytes`.

    On the host, a part of it takes what :func:`host_adam_s` says; states that waited there come back first. Adapters of
    frozen weights are too small to count.
    """
    if stack.trains_adapters:
        return (StepEnds(0.0, 0.0, 0.0, ()),) * point.pp
    dense, expert = shard_groups(point, profile)
    precision = PRECISIONS[point.precision]
    grad_bytes, update_bytes = DTYPE_BYTES[point.grad_dtype], adam_bytes(point)
    requantize_own_bytes, requantize_all_bytes = requantize_bytes(point)
    is_sharded = point.sharding != "none"
    # Full sharding gathers weights for every forward and every backward, and reduces gradients every micro-batch.
    num_gathers, num_reductions = (
        (2 * point.num_micro_batches, point.num_micro_batches) if point.sharding == "full" else (1, 1)
    )
    state_bytes = main_weight_bytes(point) + 2 * DTYPE_BYTES[point.moment_dtype]
    on_host_frac = point.optimizer_cpu_frac
    bandwidth = profile.hbm_bytes_per_s.value * stack.optimizer_efficiency_frac.value
    ends = []
    splits = stack.splits_mtp_projection
    for parameters in rank_parameters(
        model, point.layout, point.pp, tp=point.tp, etp=point.etp, ep=point.ep, splits_mtp_projection=splits
    ):
        reduce_s = gather_s = moved = host_s = 0.0
        costs: list[Cost] = []
        for is_expert, groups in ((False, dense), (True, expert)):
            group = groups.shard
            held = sum(one.num_elements for one in parameters if one.is_expert == is_expert)
            quantized = sum(one.num_elements for one in parameters if one.is_expert == is_expert and one.is_quantized)
            reduction = collective_cost(
                "reduce_scatter" if is_sharded else "all_reduce", held * grad_bytes, group, profile
            )
            repeated = collective_cost(
                "all_reduce", held * grad_bytes / (group.num_ranks if is_sharded else 1), groups.replica, profile
            )
            reduce_s += num_reductions * reduction.seconds + repeated.seconds
            costs += [reduction, repeated] if groups.replica.num_ranks > 1 else [reduction]
            if is_sharded:
                gathering = collective_cost("all_gather", held * precision.param_bytes, group, profile)
                gather_s += num_gathers * gathering.seconds
                costs.append(gathering)
            own = held / group.num_ranks if is_sharded else held
            # Adam, the norm's read of gradients, zeroing them where a stack does, requantizing weights once a step.
            own_quantized = quantized / group.num_ranks if is_sharded else quantized
            moved += own_quantized * requantize_own_bytes + quantized * requantize_all_bytes
            zeroed = held if stack.zeroes_main_grads else own * (point.sharding == "full")  # units add to parts
            moved += own * (update_bytes * (1 - on_host_frac) + grad_bytes) + zeroed * grad_bytes
            host_s += host_adam_s(own * on_host_frac, profile)
            if point.offload_optimizer_states:
                host_s += states_back_s(own * state_bytes, profile)
        ends.append(StepEnds(reduce_s, gather_s, moved / bandwidth + host_s, tuple(costs)))
    return tuple(ends)


def exposed_seconds(comm_s: float, window_s: float, num_chunks: int, *, overlap: bool) -> float:
    """Seconds of a collective that lengthen the step.

    All without overlap; else what exceeds the window of compute beside it, and at least the bucket that is done last.
    What hides still takes its SMs from the compute beside it.
    """
    if not overlap:
        return comm_s
    exposed_s = max(comm_s - window_s * (num_chunks - 1) / num_chunks, comm_s / num_chunks)
    return exposed_s + (comm_s - exposed_s) * COLLECTIVE_SM_FRAC
