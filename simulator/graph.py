"""One part's op graph, costed: when each op runs on its stream, and which seconds each family exposes.

Ops of one stream run in program order; ops of different streams run side by side once what they wait for is done.
The time of a phase is the longest path. Where the host cannot issue kernels as fast as the device runs them, the
difference is the host's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.simulator.backward_ops import predecessors
from moeplan.simulator.costs import cost
from moeplan.simulator.host import host_seconds, issued_seconds
from moeplan.simulator.op import Cost, Op, OpRun
from moeplan.simulator.stack_time import StackTime
from moeplan.vocabulary import OP_FAMILIES, CudaGraphScope, OpFamily

Array = NDArray[np.float64]
# Part of busy time that GEMMs take in a dense layer, where sustained rates are read (report section 1.2: about 70 %).
FULL_POWER_DUTY = 0.75
FAMILY_INDEX: dict[OpFamily, int] = {family: index for index, family in enumerate(OP_FAMILIES)}


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


def critical_path(time: PhaseTime, ops: Sequence[Op]) -> tuple[OpRun, ...]:
    """The chain of ops, over all streams, that no other chain outlasts: the longest path of :func:`op_graph`.

    Its seconds are the phase without what the host adds: shortening an op beside it shortens nothing. ``ops`` are
    those that ``time`` was made of.
    """
    runs = {run.op.name: run for run in time.runs}
    graph = op_graph(ops)
    graph.add_edges_from((name, "") for name in list(graph))  # what ends last, whichever it is
    for earlier, _, data in graph.edges(data=True):
        data["seconds"] = runs[earlier].cost.seconds
    return tuple(runs[name] for name in nx.dag_longest_path(graph, weight="seconds") if name)


def phase_time(
    ops: Sequence[Op], profile: HardwareProfile, stack: StackTime, cuda_graph: Sequence[CudaGraphScope]
) -> PhaseTime:
    """Cost every op, run the graph as early as it can, and say who exposes what.

    Exposed: all of the compute stream, and of other streams what runs while the compute stream waits. The exposed
    seconds, the host's included, add up to the phase.
    """
    waits = predecessors(ops)
    runs = _scheduled(ops, _costs(ops, profile, issued_seconds(ops, profile, stack, cuda_graph)), waits)
    ordered = tuple(sorted(runs, key=lambda run: (run.start_s, run.end_s)))
    device_s = max((run.end_s for run in ordered), default=0.0)
    total, exposed = np.zeros(len(OP_FAMILIES)), np.zeros(len(OP_FAMILIES))
    for run in ordered:
        total[FAMILY_INDEX[run.op.family]] += run.cost.seconds
    for family, seconds in _exposed(ordered):
        exposed[FAMILY_INDEX[family]] += seconds
    host = FAMILY_INDEX["host"]
    issued_s, waiting_s = host_seconds(runs, waits, profile, stack, cuda_graph)
    total[host] = exposed[host] = waiting_s
    return PhaseTime(device_s + waiting_s, issued_s, total, exposed, ordered)


def _costs(ops: Sequence[Op], profile: HardwareProfile, issued_s: float) -> list[Cost]:
    """Costs of ops beside each other: GEMMs slow down to the sustained rate as they fill the time.

    The power limit governs an average: a phase that computes half of the time runs its GEMMs nearer to the burst
    rate, with s the sustained fraction and d the part of GEMMs at (1 - (1 - s) min(1, d / FULL_POWER_DUTY)). A phase
    lasts at least as long as the host takes to issue it, ``issued_s``.
    """
    costs = [cost(op, profile) for op in ops]
    computing = [
        op.kind in ("gemm", "grouped_gemm") and one.bound == "compute" for op, one in zip(ops, costs, strict=True)
    ]
    gemm_s = sum(one.seconds for one, is_gemm in zip(costs, computing, strict=True) if is_gemm)
    busy_s = sum(one.seconds for one in costs)
    if not gemm_s:
        return costs
    sustained = profile.sustained_frac.value
    reached = 1 - (1 - sustained) * min(1.0, gemm_s / max(busy_s, issued_s) / FULL_POWER_DUTY)
    return [
        Cost(one.seconds * sustained / reached, one.bound, one.source, one.error_frac, one.note) if is_gemm else one
        for one, is_gemm in zip(costs, computing, strict=True)
    ]


def _scheduled(ops: Sequence[Op], costs: Sequence[Cost], waits: Mapping[str, tuple[str, ...]]) -> list[OpRun]:
    """Every op as early as it can run, in program order: what an op waits for stands before it."""
    end_s: dict[str, float] = {}
    free_s: dict[str, float] = {}
    runs = []
    for op, op_cost in zip(ops, costs, strict=True):
        start_s = max((end_s[earlier] for earlier in waits[op.name]), default=0.0)
        run = OpRun(op, op_cost, max(start_s, free_s.get(op.stream, 0.0)))
        end_s[op.name] = free_s[op.stream] = run.end_s
        runs.append(run)
    return runs


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
