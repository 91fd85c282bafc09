"""Schedules of the learning rate, at points worked out by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.executor.learning_rate import learning_rate
from moeplan.run_config import RunConfig

RUN: dict[str, Any] = {"steps": 30, "lr": 1.0, "lr_warmup_steps": 10, "min_lr_frac": 0.2}


def rates(**run: Any) -> list[float]:
    return [learning_rate(RunConfig(**(RUN | run)), step) for step in range(31)]


def test_it_rises_linearly_and_falls_as_a_cosine() -> None:
    found = rates()
    assert found[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert [found[step] for step in (10, 20, 30)] == pytest.approx([1.0, 0.6, 0.2])
    assert rates(lr_warmup_steps=0)[0] == 1.0


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ({"lr_schedule": "linear"}, [1.0, 0.8, 0.6, 0.2]),
        ({"lr_schedule": "constant"}, [1.0, 1.0, 1.0, 1.0]),
        ({"lr_schedule": "wsd", "lr_cooldown_steps": 8}, [1.0, 1.0, 1.0, 0.2]),
        ({"lr_schedule": "wsd", "lr_cooldown_steps": 16}, [1.0, 0.95, 0.7, 0.2]),
        ({"lr_schedule": "linear", "lr_decay_steps": 20}, [1.0, 0.6, 0.2, 0.2]),
        ({"lr_schedule": "linear", "lr_decay_steps": 50}, [1.0, 0.9, 0.8, 0.6]),
    ],
)
def test_other_schedules(schedule: dict[str, Any], expected: list[float]) -> None:
    found = rates(**schedule)
    assert [found[step] for step in (10, 15, 20, 30)] == pytest.approx(expected)


@given(
    st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    st.integers(0, 40),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(0, 80),
)
def test_it_stays_below_the_peak_and_after_the_warm_up_above_the_least(
    schedule: str, warmup: int, decay: int, cooldown: int, step: int
) -> None:
    changes = {"lr_schedule": schedule, "lr_decay_steps": decay, "lr_cooldown_steps": cooldown}
    rate = learning_rate(RunConfig.model_validate(RUN | changes | {"lr_warmup_steps": warmup}), step)
    assert 0 < rate <= 1
    assert step < warmup or rate >= 0.2 - 1e-12
