"""What the host adds: kernels cannot run before they are issued, and a dispatch stops the host.

Kernels are issued one after another; those that a CUDA graph holds are issued together. In a forward the host waits for
the counts of tokens before it can go on (report section 2.2), so from one dispatch to the next it starts level with the
device: that is the layer's period. Without such a stop the host runs ahead, and only its whole work counts.
"""

from collections.abc import Iterable, Mapping, Sequence

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.simulator.op import GraphScope, Op, OpRun
from moeplan.simulator.stack_time import StackTime
from moeplan.vocabulary import CudaGraphScope

# Ops that each scope's graph launches; the shared expert is captured with the router (report section 3.4), and the
# router's kernels include the preprocess.
GRAPHED: dict[CudaGraphScope, tuple[GraphScope, ...]] = {
    "attn": ("attention",),
    "mamba": ("mamba",),
    "mlp": ("mlp",),
    "moe_router": ("router",),
    "moe_preprocess": (),
    "moe": ("router", "moe"),
    "full_iteration": ("attention", "mamba", "router", "moe", "mlp", "outside"),
}


def issued_seconds(
    ops: Iterable[Op], profile: HardwareProfile, stack: StackTime, cuda_graph: Sequence[CudaGraphScope]
) -> float:
    """Host time to issue the kernels of ``ops``, those of graphs aside."""
    if "full_iteration" in cuda_graph:
        return 0.0
    graphed = _graphed(cuda_graph)
    launches = 0.0
    for op in ops:
        launches += op.num_kernels * (op.scope not in graphed) + stack.stop_launches.value * op.stops_host
    return launches * stack.launches_per_op.value * profile.launch_s.value


def _graphed(cuda_graph: Sequence[CudaGraphScope]) -> frozenset[GraphScope]:
    return frozenset(scope for name in cuda_graph for scope in GRAPHED[name])


def host_seconds(
    runs: Sequence[OpRun],
    waits: Mapping[str, tuple[str, ...]],
    profile: HardwareProfile,
    stack: StackTime,
    cuda_graph: Sequence[CudaGraphScope],
) -> tuple[float, float]:
    """Host time to issue the kernels of ``runs`` (in program order), and the part of it that the device waits for.

    On a CPU the same cores issue and compute, so issuing is never hidden.
    """
    if "full_iteration" in cuda_graph:
        return 0.0, 0.0
    graphed = _graphed(cuda_graph)
    launch_s = stack.launches_per_op.value * profile.launch_s.value
    stopped_s = stack.stop_launches.value * launch_s
    num_kernels = sum(run.op.num_kernels for run in runs if run.op.scope not in graphed)
    issued_s = issued_seconds((run.op for run in runs), profile, stack, cuda_graph)
    if profile.device == "cpu":
        return issued_s, issued_s
    device_s = max((run.end_s for run in runs), default=0.0)
    gaps_s = 0.0 if stack.kernel_gap_s is None else num_kernels * stack.launches_per_op.value * stack.kernel_gap_s.value
    stop = next((at for at, run in enumerate(runs) if run.op.stops_host), None)
    if stop is None:
        return issued_s, max(gaps_s, issued_s - device_s)
    period = [*runs[stop + 1 :], *runs[: stop + 1]]
    waiting_s = in_order_s(period, waits, graphed, launch_s, stopped_s) - in_order_s(period, waits, graphed, 0.0, 0.0)
    return issued_s, max(gaps_s, waiting_s)


def in_order_s(
    runs: Sequence[OpRun],
    waits: Mapping[str, tuple[str, ...]],
    graphed: frozenset[GraphScope],
    launch_s: float,
    host_s: float,
) -> float:
    """Seconds until all ``runs`` are done where every kernel takes the host ``launch_s``, from ``host_s`` on.

    An op of several kernels ends no sooner than its last kernel, issued last, takes.
    """
    end_s: dict[str, float] = {}
    free_s: dict[str, float] = {}
    captured: GraphScope | None = None
    for run in runs:
        op = run.op
        is_graphed = op.scope in graphed
        num_issued = float(op.scope != captured) if is_graphed else op.num_kernels
        captured = op.scope if is_graphed else None
        first_s = host_s + launch_s * min(1.0, num_issued)
        host_s += launch_s * num_issued
        start_s = max(first_s, free_s.get(op.stream, 0.0), *(end_s.get(name, 0.0) for name in waits[op.name]))
        last_s = host_s + run.cost.seconds / max(1.0, num_issued)
        end_s[op.name] = free_s[op.stream] = max(start_s + run.cost.seconds, last_s)
    return max(end_s.values(), default=0.0)
