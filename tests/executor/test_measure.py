import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import RunFailedError
from moeplan.executor import measure
from moeplan.executor.measure import StepTimer, StepTrace
from moeplan.executor.scopes import is_traced, scope, tracing
from moeplan.units import MIB
from moeplan.vocabulary import OP_FAMILIES

CPU = torch.device("cpu")


def test_untimed_steps_are_left_out_and_the_median_counts() -> None:
    timer = StepTimer(num_untimed=1, device=CPU)
    for pause_s in (0.05, 0.01, 0.02, 0.011):
        with timer.step():
            time.sleep(pause_s)
    pauses_s = zip((0.05, 0.01, 0.02, 0.011), timer.all_times_s, strict=True)
    assert all(pause_s <= time_s for pause_s, time_s in pauses_s)
    assert timer.times_s == tuple(timer.all_times_s[1:])
    assert timer.step_s == statistics.median(timer.times_s)  # what a busy machine adds is in both


def test_no_timed_step_is_an_error_that_says_so() -> None:
    timer = StepTimer(num_untimed=3, device=CPU)
    with timer.step():
        pass
    with pytest.raises(RunFailedError, match="no step was timed: 1 steps, the first 3 untimed"):
        _ = timer.step_s


def test_spread_is_half_the_range_of_the_deciles_over_the_median() -> None:
    assert measure.spread_frac([1.0]) == 0.0
    assert measure.spread_frac([float(reading) for reading in range(1, 12)]) == pytest.approx((10 - 2) / 2 / 6)


@given(st.floats(1e-6, 1e3), st.lists(st.floats(0.5, 2.0), min_size=2))
def test_spread_does_not_depend_on_the_unit(scale: float, readings: list[float]) -> None:
    scaled = measure.spread_frac([scale * reading for reading in readings])
    assert scaled == pytest.approx(measure.spread_frac(readings), abs=1e-9)


def test_resident_memory_grows_by_what_is_written_and_its_peak_stays() -> None:
    before_bytes = measure.resident_bytes()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    assert 60 * MIB < measure.resident_bytes() - before_bytes < 80 * MIB
    del block
    assert measure.peak_resident_bytes() > before_bytes + 60 * MIB
    assert measure.resident_bytes() < before_bytes + 60 * MIB
    if measure.reset_peak_resident():
        assert measure.peak_device_bytes(CPU).reserved < before_bytes + 60 * MIB


def test_a_trace_is_known_in_every_thread_until_it_ends() -> None:
    with ThreadPoolExecutor(1) as other:

        def seen() -> tuple[bool, bool]:
            return is_traced(), other.submit(is_traced).result()

        def failing_step() -> None:
            with StepTrace(CPU):
                assert seen() == (True, True)
                raise RuntimeError("a step failed")

        with pytest.raises(RuntimeError, match="a step failed"):
            failing_step()
        assert seen() == (False, False)


def test_scopes_cost_nothing_while_nothing_is_traced() -> None:
    assert len({id(scope(family)) for family in OP_FAMILIES}) == 1
    activities = [torch.profiler.ProfilerActivity.CPU]
    with tracing(), torch.profiler.profile(activities=activities) as profile, scope("router"):
        torch.ones(1)
    assert "moeplan/router" in {event.name for event in profile.events()}
