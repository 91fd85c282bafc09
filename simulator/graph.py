"""One part's op graph, costed: when each op runs on its stream, and which seconds each family exposes.

Ops of one stream run in program order; ops of different streams run side by side once what they wait for is done.
The time of a phase is the longest path. Where the host cannot issue kernels as fast as the device runs them, the
difference is the host's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.simulator.backward_ops import predecessors
from moeplan.simulator.costs import cost
from moeplan.simulator.op import Cost, GraphScope, Op
from moeplan.simulator.stack_time import StackTime
from moeplan.vocabulary import OP_FAMILIES, CudaGraphScope, OpFamily

Array = NDArray[np.float64]
# Ops that each scope's graph launches; the shared expert is captured with the router (report section 3.4), and the
# router's kernels include the preprocess.
GRAPHED: dict[CudaGraphScope, tuple[GraphScope, ...]] = {
    "attn": ("attention",),
    "mlp": ("mlp",),
    "moe_router": ("router",),
    "moe_preprocess": (),
    "moe": ("router", "moe"),
    "full_iteration": ("attention", "router", "moe", "mlp", "outside"),
}
FAMILY_INDEX: dict[OpFamily, int] = {family: index for index, family in enumerate(OP_FAMILIES)}


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
class PhaseTime:
    """Forward or backward of one part.

    ``total_s`` and ``exposed_s`` are by family, in the order of OP_FAMILIES; ``issued_s`` is the host's work.
    """

    seconds: float
    issued_s: float
    total_s: Array
    exposed_s: Array
    runs: tuple[OpRun, ...]


def op_graph(ops: Sequence[Op]) -> nx.DiGraph:
    """Nodes: op names with attribute ``op``. Edges: what an op waits for, and the op before it on its stream."""
    graph = nx.DiGraph()
    last_of_stream: dict[str, str] = {}
    waits = predecessors(ops)
    for op in ops:
        graph.add_node(op.name, op=op)
        for earlier in waits[op.name]:
            graph.add_edge(earlier, op.name)
        if op.stream in last_of_stream:
            graph.add_edge(last_of_stream[op.stream], op.name)
        last_of_stream[op.stream] = op.name
    return graph


def phase_time(
    ops: Sequence[Op], profile: HardwareProfile, stack: StackTime, cuda_graph: Sequence[CudaGraphScope]
) -> PhaseTime:
    """Cost every op, run the graph as early as it can, and say who exposes what.

    Exposed: all of the compute stream, and of other streams what runs while the compute stream waits. The exposed
    seconds, the host's included, add up to the phase.
    """
    ordered = _scheduled(ops, profile)
    device_s = max((run.end_s for run in ordered), default=0.0)
    total, exposed = np.zeros(len(OP_FAMILIES)), np.zeros(len(OP_FAMILIES))
    for run in ordered:
        total[FAMILY_INDEX[run.op.family]] += run.cost.seconds
    for family, seconds in _exposed(ordered):
        exposed[FAMILY_INDEX[family]] += seconds
    host = FAMILY_INDEX["host"]
    issued_s, waiting_s = host_seconds(ordered, profile, stack, cuda_graph)
    total[host] = exposed[host] = waiting_s
    return PhaseTime(device_s + waiting_s, issued_s, total, exposed, ordered)


def _scheduled(ops: Sequence[Op], profile: HardwareProfile) -> tuple[OpRun, ...]:
    """Every op as early as it can run, by start. What an op waits for stands before it: one pass is enough."""
    end_s: dict[str, float] = {}
    free_s: dict[str, float] = {}
    runs = []
    waits = predecessors(ops)
    for op in ops:
        start_s = max((end_s[earlier] for earlier in waits[op.name]), default=0.0)
        run = OpRun(op, cost(op, profile), max(start_s, free_s.get(op.stream, 0.0)))
        end_s[op.name] = free_s[op.stream] = run.end_s
        runs.append(run)
    return tuple(sorted(runs, key=lambda run: (run.start_s, run.end_s)))


def host_seconds(
    runs: Sequence[OpRun], profile: HardwareProfile, stack: StackTime, cuda_graph: Sequence[CudaGraphScope]
) -> tuple[float, float]:
    """Host time to issue the kernels that no CUDA graph issues, and the part of it that the device waits for.

    Host and device run side by side, but a forward's dispatch stops the host until the counts of tokens are known
    (report section 2.2), so what the host is ahead by then is lost: each side of a dispatch is bound on its own.
    On a CPU the same cores issue and compute, so issuing is never hidden.
    """
    graphed = {scope for name in cuda_graph for scope in GRAPHED[name]}
    if "full_iteration" in cuda_graph:
        return 0.0, 0.0
    launch_s = stack.launches_per_op.value * profile.launch_s.value
    issued = waiting = side = device_from = until = 0.0
    for run in runs:
        if run.op.kind == "exchange" and run.op.segment == "dispatch" and run.op.phase == "fwd":
            waiting += max(0.0, side - (until - device_from))
            device_from, side = until, 0.0
        if run.op.scope not in graphed:
            issued += run.op.num_kernels * launch_s
            side += run.op.num_kernels * launch_s
        until = max(until, run.end_s)
    if profile.device == "cpu":
        return issued, issued
    return issued, waiting + max(0.0, side - (until - device_from))


def _exposed(runs: Sequence[OpRun]) -> list[tuple[OpFamily, float]]:
    """Seconds by family that lengthen the phase: compute as it is, others where compute waits, each instant once."""
    found = [(run.op.family, run.cost.seconds) for run in runs if run.op.stream == "compute"]
    compute = sorted((run.start_s, run.end_s) for run in runs if run.op.stream == "compute")
    covered_until = 0.0
    gaps: list[tuple[float, float]] = []
    for start, end in [*compute, (max((run.end_s for run in runs), default=0.0), 0.0)]:
        if start > covered_until:
            gaps.append((covered_until, start))
        covered_until = max(covered_until, end)
    for gap_start, gap_end in gaps:
        reached = gap_start
        for run in runs:
            if run.op.stream != "compute" and run.end_s > reached and run.start_s < gap_end:
                end = min(run.end_s, gap_end)
                found.append((run.op.family, end - max(reached, run.start_s)))
                reached = end
    return found
