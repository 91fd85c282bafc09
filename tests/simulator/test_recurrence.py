"""The max-plus recurrence: closed forms, agreement with the events, exact skipping of groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.pipeline_order import schedule_problem
from moeplan.simulator.events import simulate, timeline
from moeplan.simulator.recurrence import compile_order, pipeline_time, walk

SECONDS = st.floats(1e-3, 10)


@st.composite
def plans(draw: st.DrawFn) -> tuple[tuple[int, int, int, int | None], list[float], list[float], float]:
    """A legal order with durations of every stage: all alike, or each its own."""
    pp = draw(st.integers(1, 6))
    vp = draw(st.integers(1, 3)) if pp > 1 else 1
    group = pp if draw(st.booleans()) else draw(st.integers(pp, pp + 3))
    micro_batches = draw(st.integers(1, 40).filter(lambda count: not schedule_problem(pp, vp, count, group)))
    stages = pp * vp
    if draw(st.booleans()):
        forward = [draw(SECONDS)] * stages
        backward = [draw(SECONDS)] * stages
    else:
        forward = draw(st.lists(SECONDS, min_size=stages, max_size=stages))
        backward = draw(st.lists(SECONDS, min_size=stages, max_size=stages))
    return (pp, vp, micro_batches, group), forward, backward, draw(st.floats(0, 2))


@settings(max_examples=200)
@given(plan=plans())
def test_agrees_with_the_events(
    plan: tuple[tuple[int, int, int, int | None], list[float], list[float], float],
) -> None:
    order, forward, backward, send = plan
    times = pipeline_time(order, np.array([forward]), np.array([backward]), np.array([send]))
    runs = simulate(order, forward, backward, send)
    assert len(runs) == 2 * order[0] * order[1] * order[2]
    assert times.step_s[0] == pytest.approx(timeline(runs).end_s, rel=1e-9)
    for rank in range(order[0]):
        own = [run for run in runs if run.rank == rank]
        assert times.end_s[0, rank] == pytest.approx(max(run.end_s for run in own), rel=1e-9)
        assert times.busy_s[0, rank] == pytest.approx(sum(run.end_s - run.start_s for run in own), rel=1e-9)


@pytest.mark.parametrize("pp, micro_batches", [(1, 1), (1, 64), (4, 8), (4, 64), (8, 37), (16, 1000)])
def test_uniform_1f1b_is_m_plus_p_minus_1(pp: int, micro_batches: int) -> None:
    times = pipeline_time((pp, 1, micro_batches, None), np.full((1, pp), 1.0), np.full((1, pp), 2.0), np.zeros(1))
    assert times.step_s[0] == (micro_batches + pp - 1) * 3
    assert times.bubble_s[0] == pytest.approx([(pp - 1) * 3] * pp)


@pytest.mark.parametrize("vp", [2, 4, 8])
def test_interleaving_divides_the_bubble(vp: int) -> None:
    """Bubble (P - 1)(F + B) / V with F and B of all chunks of a rank (report section 1.5)."""
    pp, micro_batches = 4, 32
    forward, backward = np.full((1, pp * vp), 1 / vp), np.full((1, pp * vp), 2 / vp)
    times = pipeline_time((pp, vp, micro_batches, None), forward, backward, np.zeros(1))
    assert times.step_s[0] == pytest.approx(micro_batches * 3 + (pp - 1) * 3 / vp)


@pytest.mark.parametrize("pp, vp, micro_batches", [(4, 1, 64), (4, 4, 128), (8, 2, 160), (2, 8, 60)])
def test_skipped_groups_change_nothing(pp: int, vp: int, micro_batches: int) -> None:
    """Plans that settle at once, late and never, against a walk over every chunk."""
    random = np.random.default_rng(seed=pp * vp)
    forward, backward = random.uniform(0.5, 1.5, (2, 12, pp * vp))
    forward[:4], backward[:4] = 1.0, 2.0
    sends = random.uniform(0, 0.1, 12)
    fast = pipeline_time((pp, vp, micro_batches, None), forward, backward, sends)
    whole = compile_order(pp, vp, micro_batches, pp)
    levels_only = type(whole)(whole.levels, whole.num_slots, (), ())
    durations = np.stack([forward, backward], axis=2).reshape(12, -1).T
    assert pytest.approx(walk(levels_only, durations, sends, pp), rel=1e-12) == fast.end_s.T


def test_plans_of_one_batch_do_not_see_each_other() -> None:
    random = np.random.default_rng(seed=1)
    forward, backward = random.uniform(0.5, 1.5, (2, 5, 8))
    together = pipeline_time((4, 2, 16, None), forward, backward, np.full(5, 0.1))
    for row in range(5):
        alone = pipeline_time((4, 2, 16, None), forward[row : row + 1], backward[row : row + 1], np.full(1, 0.1))
        assert together.step_s[row] == alone.step_s[0]
