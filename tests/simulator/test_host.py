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
