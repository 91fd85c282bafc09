"""Fits: what was planted is found, ranges hold, held-out errors come from values that did not see the fold."""

from dataclasses import replace

import pytest

from moeplan.plan import Plan
from moeplan.planner.fit import fit, observations
from moeplan.planner.fit_constants import FIT_CONSTANTS, current_values, with_values
from moeplan.planner.published_rows import read_published_rows
from moeplan.planner.scoring import Case, case_of, predicted_step_s, profile_of, stack_of
from moeplan.presets import load_model
from tests.planner.test_published_plan import SAMPLE

CASES = [case_of(row) for row in read_published_rows(SAMPLE)[0]]
PROFILES = {name: profile_of(name) for name in sorted({case.plan.hardware for case in CASES})}
STACKS = {name: stack_of(name) for name in sorted({case.plan.stack for case in CASES})}
TWO = tuple(one for one in FIT_CONSTANTS if one.field in ("elementwise_factor", "exchange_contention_frac"))


def test_constants_are_few_named_once_and_in_range() -> None:
    assert len(FIT_CONSTANTS) <= 15  # one for ten groups of the published runs they are fitted to
    assert len({one.label for one in FIT_CONSTANTS}) == len(FIT_CONSTANTS)
    profiles = {name: profile_of(name) for name in ("h100", "h200", "b200", "b300", "gb200", "gb300")}
    for constant, value in zip(FIT_CONSTANTS, current_values(FIT_CONSTANTS, profiles, STACKS), strict=True):
        assert constant.low <= value <= constant.high
        assert constant.meaning


def test_values_land_where_they_belong_as_fitted() -> None:
    profiles, stacks = with_values(TWO, [1.25, 0.5], PROFILES, STACKS, "a test")
    assert all(stack.time.elementwise_factor.value == 1.25 for stack in stacks.values())
    assert {stack.time.exchange_contention_frac.source for stack in stacks.values()} == {"fitted"}
    assert profiles == PROFILES
    assert STACKS["megatron-bridge-26.08"].time.exchange_contention_frac.value != 0.5


def test_rows_of_one_plan_are_one_observation_and_a_group_weighs_one() -> None:
    seen = observations([*CASES, CASES[0]])
    assert len(seen) == len(CASES)
    by_group: dict[str, float] = {}
    for one in seen:
        by_group[one.group] = by_group.get(one.group, 0.0) + one.weight
    assert all(weight == pytest.approx(1.0) for weight in by_group.values())


def test_planted_values_are_found_and_predict_what_they_have_not_seen() -> None:
    planted = (1.6, 0.4)
    profiles, stacks = with_values(TWO, planted, PROFILES, STACKS, "planted")

    def measured(case: Case) -> Case:
        step_s = predicted_step_s(case, profiles[case.plan.hardware], stacks[case.plan.stack])
        return replace(case, published_step_s=step_s)

    result = fit(TWO, [measured(case) for case in CASES], PROFILES, STACKS)
    assert result.values[0] == pytest.approx(planted[0], rel=0.05)
    assert result.values[1] == pytest.approx(planted[1], rel=0.2)
    assert max(map(abs, result.group_errors.values())) < 0.02
    assert max(map(abs, result.held_out_errors.values())) < 0.05
    assert set(result.held_out_errors) == set(result.without_model_errors) == set(result.group_errors)


def test_hybrids_move_their_own_constant_alone() -> None:
    plan = Plan(
        model=load_model("nemotron3-nano-30b-a3b"), hardware="gb300", stack="megatron-bridge-26.08", num_gpus=8,
        seq_len=8192, global_batch_size=512, mbs=4, ep=8, precision="mxfp8",
    )  # fmt: skip
    profiles, stacks = PROFILES | {"gb300": profile_of("gb300")}, STACKS | {plan.stack: stack_of(plan.stack)}
    row = replace(CASES[0].row, cells={"id": "hybrid"})
    predicted_s = predicted_step_s(Case(row, plan, 1.0), profiles["gb300"], stacks[plan.stack])
    scan = tuple(one for one in FIT_CONSTANTS if one.of_hybrids)
    hybrid = Case(row, plan, 1.2 * predicted_s)
    alone, beside = (fit((*TWO, *scan), cases, profiles, stacks) for cases in (CASES, [*CASES, hybrid]))
    assert beside.values[:2] == pytest.approx(alone.values[:2], rel=1e-3)
    assert beside.values[2] < 0.9 * alone.values[2]
