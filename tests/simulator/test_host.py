"""The host: kernels in program order, stops at dispatches, graphs."""

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.simulator.backward_ops import predecessors
from moeplan.simulator.host import host_seconds, in_order_s
from moeplan.simulator.op import Cost, Op, OpKind, OpRun
from moeplan.simulator.stack import load_stack

PROFILE, STACK = load_profile("gb200"), load_stack("megatron-bridge-26.08").time
LAUNCH_S = STACK.launches_per_op.value * PROFILE.launch_s.value


def runs(*sizes: tuple[str, float, float]) -> list[OpRun]:
    """Ops one after another: name, device seconds in launches, kernels. ``dispatch`` stops the host."""
    made, start_s = [], 0.0
    for name, launches, num_kernels in sizes:
        kind: OpKind = "exchange" if name == "dispatch" else "memory"
        op = Op(name=name, kind=kind, family="dispatch", segment="dispatch", scope="moe", num_kernels=num_kernels)
        made.append(OpRun(op, Cost(launches * LAUNCH_S, "hbm", "measured", 0.0), start_s))
        start_s = made[-1].end_s
    return made


def test_a_gpu_pauses_between_kernels() -> None:
    made = runs(("a", 9, 2), ("b", 9, 4))
    waits = predecessors([run.op for run in made])
    gap = STACK.launches_per_op.model_copy(update={"value": 1e-6})
    stack = STACK.model_copy(update={"kernel_gap_s": gap})
    paused_s = host_seconds(made, waits, PROFILE, stack, [])[1]
    assert paused_s == pytest.approx(6 * 1e-6 * STACK.launches_per_op.value)
    assert host_seconds(made, waits, PROFILE, stack, ["moe"])[1] == 0
    assert waiting_s(made) == 0


def waiting_s(made: list[OpRun], *graphs: str) -> float:
    waits = predecessors([run.op for run in made])
    return host_seconds(made, waits, PROFILE, STACK, graphs)[1]  # type: ignore[arg-type]


def test_a_host_that_runs_ahead_is_never_waited_for() -> None:
    assert waiting_s(runs(("a", 100, 1), ("b", 1, 50))) == 0
    assert waiting_s(runs(("a", 10, 1), ("b", 1, 50))) == pytest.approx(40 * LAUNCH_S)


def test_a_dispatch_takes_the_lead_away() -> None:
    ahead = runs(("a", 100, 1), ("dispatch", 1, 1), ("experts", 1, 50))
    stopped = STACK.stop_launches.value
    # The period starts at the stop: the host comes back, issues 50 kernels, then a waits for its own.
    assert waiting_s(ahead) == pytest.approx((stopped + 50) * LAUNCH_S, rel=0.05)


def test_graphs_are_issued_at_once() -> None:
    assert waiting_s(runs(("a", 1, 50)), "full_iteration") == 0
    assert waiting_s(runs(("a", 1, 50)), "moe") == 0


def test_a_slower_host_never_ends_sooner() -> None:
    made = runs(("a", 3, 5), ("dispatch", 4, 1), ("experts", 2, 7))
    waits = predecessors([run.op for run in made])
    ends = [in_order_s(made, waits, frozenset(), factor * LAUNCH_S, 0.0) for factor in (0.0, 0.5, 1.0, 2.0)]
    assert ends == sorted(ends)
    assert ends[0] == pytest.approx(9 * LAUNCH_S)
