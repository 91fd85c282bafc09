"""Op graphs: longest path, exposed seconds, the host."""

import networkx as nx
import numpy as np
import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.model_spec import MOE_LAYER
from moeplan.plan import Plan
from moeplan.simulator.backward_ops import backward_ops
from moeplan.simulator.graph import FAMILY_INDEX, PhaseTime, critical_path, op_graph, phase_time
from moeplan.simulator.layer_ops import forward_ops
from moeplan.simulator.op import Cost, Op, OpRun, Placement
from moeplan.simulator.op_shapes import OpShape, Part
from moeplan.simulator.overlap import hidden_by_family, paired_frac
from moeplan.simulator.stack import load_stack
from moeplan.vocabulary import OP_FAMILIES, CudaGraphScope

PROFILE = load_profile("gb200")
FULL: tuple[CudaGraphScope, ...] = ("full_iteration",)
STACK = load_stack("megatron-bridge-26.08")
EAGER = STACK.time


def op(name: str, microseconds: float, **fields: object) -> Op:
    """A memory-bound op of a given duration."""
    reached = PROFILE.hbm_bytes_per_s.value * PROFILE.hbm_efficiency_frac.value
    made: dict[str, object] = {"family": "elementwise", "hbm_bytes": microseconds * 1e-6 * reached, **fields}
    return Op(name=name, kind="memory", **made)  # type: ignore[arg-type]


def test_streams_run_side_by_side_and_expose_what_compute_waits_for() -> None:
    ops = [
        op("first", 100),
        op("send", 300, stream="dispatch", family="dispatch"),
        op("beside", 120, after=("first",)),
        op("last", 50, after=("send", "beside")),
    ]
    time = phase_time(ops, PROFILE, STACK.time, FULL)
    assert time.seconds == pytest.approx(450e-6)
    assert time.exposed_s[FAMILY_INDEX["dispatch"]] == pytest.approx(180e-6)
    assert time.total_s[FAMILY_INDEX["dispatch"]] == pytest.approx(300e-6)
    assert time.exposed_s.sum() == pytest.approx(time.seconds)


def test_two_waiting_streams_are_not_counted_twice() -> None:
    ops = [
        op("a", 200, stream="tp", family="tp_comm"),
        op("b", 300, stream="dispatch", family="dispatch", after=()),
        op("last", 10, after=("a", "b")),
    ]
    time = phase_time(ops, PROFILE, STACK.time, FULL)
    assert time.seconds == pytest.approx(310e-6)
    assert time.exposed_s.sum() == pytest.approx(time.seconds)


@pytest.mark.parametrize("cuda_graph", [FULL, ()], ids=["graphs", "eager"])
@pytest.mark.parametrize("changes", [{}, {"tp": 2, "recompute": ("moe",)}, {"cp": 2, "dispatcher": "flex"}])
def test_layer_is_its_longest_path_and_exposed_seconds_add_up(
    report_plan: Plan, changes: dict[str, object], cuda_graph: tuple[CudaGraphScope, ...]
) -> None:
    plan = report_plan.replace(**changes)
    shape = OpShape.of(plan.point, STACK, PROFILE)
    forward = forward_ops(plan.model, Part(MOE_LAYER, 5), shape, STACK)
    for ops in (forward, backward_ops(forward, shape, STACK.time)):
        graph, time = op_graph(ops), phase_time(ops, PROFILE, STACK.time, cuda_graph)
        assert nx.is_directed_acyclic_graph(graph)
        seconds = {run.op.name: run.cost.seconds for run in time.runs}
        weighted = nx.DiGraph()
        weighted.add_weighted_edges_from((before, after, seconds[before]) for before, after in graph.edges)
        weighted.add_weighted_edges_from((name, "end", seconds[name]) for name in graph.nodes)
        path = nx.dag_longest_path_length(weighted)
        assert time.seconds - time.exposed_s[FAMILY_INDEX["host"]] == pytest.approx(path)
        assert path <= time.seconds <= time.total_s.sum() * (1 + 1e-12)
        assert time.exposed_s.sum() == pytest.approx(time.seconds)


def test_slow_host_is_exposed_on_both_sides_of_a_dispatch() -> None:
    launch_s = EAGER.launches_per_op.value * PROFILE.launch_s.value
    long = 100 * launch_s * 1e6
    ops = [
        op("many", 1, num_kernels=50, scope="moe"),
        op("long", long, scope="moe"),
        Op(
            name="dispatch",
            kind="exchange",
            family="dispatch",
            stream="dispatch",
            segment="dispatch",
            comm_bytes=1e6,
            backend="alltoall",
            group=Placement(8, 1),
        ),
        op("experts", 1, num_kernels=80, segment="expert", scope="moe"),
    ]
    waiting = phase_time(ops, PROFILE, EAGER, ()).exposed_s[FAMILY_INDEX["host"]]
    # From one dispatch to the next kernels are issued in order: experts, then many, and only then the long one runs.
    stopped = EAGER.stop_launches.value
    assert (110 + stopped) * launch_s < waiting < (130 + stopped) * launch_s
    assert phase_time(ops, PROFILE, EAGER, FULL).exposed_s[FAMILY_INDEX["host"]] == 0


def test_overlap_hides_no_more_than_the_exchanges_or_the_compute(report_plan: Plan) -> None:
    shape = OpShape.of(report_plan.point, STACK, PROFILE)
    ops = forward_ops(report_plan.model, Part(MOE_LAYER, 5), shape, STACK)
    forward = phase_time(ops, PROFILE, STACK.time, FULL)
    backward = phase_time(backward_ops(ops, shape, STACK.time), PROFILE, STACK.time, FULL)
    exchanged = sum(run.cost.seconds for time in (forward, backward) for run in time.runs if run.op.kind == "exchange")
    saved = [hidden_by_family(forward, backward, slowed) for slowed in (0.0, 0.1, 0.2)]
    dispatch, gemm = FAMILY_INDEX["dispatch"], FAMILY_INDEX["expert_gemm"]
    assert saved[0].sum() == pytest.approx(exchanged)  # inside NVL72 all of it fits
    assert saved[1].sum() == pytest.approx(0.9 * exchanged)
    assert 0 <= saved[2].sum() < saved[1].sum()
    # The exchange hides; what it costs the compute beside it is the compute's.
    assert saved[1][dispatch] == pytest.approx(exchanged)
    assert saved[2][gemm] < saved[1][gemm] < 0


def test_an_exchange_longer_than_what_is_beside_it_exposes_the_rest() -> None:
    nothing = np.zeros(len(OP_FAMILIES))

    def phase(one: Op, seconds: float) -> PhaseTime:
        run = OpRun(one, Cost(seconds, "hbm", "measured", 0.0), 0.0)
        return PhaseTime(seconds, 0.0, nothing, nothing, (run,))

    forward = phase(op("attention", 1), 1.0)
    backward = phase(op("combine", 1, stream="dispatch", segment="combine", phase="dgrad", family="dispatch"), 3.0)
    saved = hidden_by_family(forward, backward, 0.5)
    # One second of compute at half its rate takes two of the three: one is exposed.
    assert saved[FAMILY_INDEX["dispatch"]] == pytest.approx(2.0)
    assert saved.sum() == pytest.approx(1.0)


def test_the_critical_path_is_the_phase_and_crosses_streams(report_plan: Plan) -> None:
    shape = OpShape.of(report_plan.point, STACK, PROFILE)
    ops = forward_ops(report_plan.model, Part(MOE_LAYER, 5), shape, STACK)
    time = phase_time(ops, PROFILE, STACK.time, FULL)
    path = critical_path(time, ops)
    assert sum(run.cost.seconds for run in path) == pytest.approx(time.seconds)
    assert {run.op.stream for run in path} >= {"compute", "dispatch"}
    ends = [run.end_s for run in path]
    assert ends == sorted(ends)


def test_warm_up_has_no_partner() -> None:
    assert paired_frac(1, 1, 8, 0) == 7 / 8
    assert paired_frac(4, 4, 128, 18) == (512 - 19) / 512
    assert paired_frac(4, 1, 2, 3) == 0


def test_a_cpu_issues_and_computes_in_turn() -> None:
    cpu = PROFILE.model_copy(update={"device": "cpu"})
    ops = [op("a", 1e6), op("b", 1e6, num_kernels=4)]
    launch_s = EAGER.launches_per_op.value * PROFILE.launch_s.value
    assert phase_time(ops, cpu, EAGER, ()).exposed_s[FAMILY_INDEX["host"]] == pytest.approx(5 * launch_s)
    assert phase_time(ops, PROFILE, EAGER, ()).exposed_s[FAMILY_INDEX["host"]] == 0
