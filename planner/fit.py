"""Fit the declared constants to measured runs, and say how well they predict runs they were not fitted to.

Least squares on the logarithm of predicted over measured step time with a robust loss; every group of rows weighs one.
Values stay in their declared ranges and are drawn weakly to where they start.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.planner.fit_constants import FitConstant, current_values, with_values
from moeplan.planner.scoring import Case
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.step_model import StepModel

Array = NDArray[np.float64]
ROBUST_SCALE = 0.03  # about the noise of published runs: larger errors pull less than their square
PRIOR_WEIGHT = 0.05  # pull of a whole range towards the start, against one group off by as much
NUM_STEPS = 3  # the model is close to linear in its constants; further steps change the last digit
REF = "moeplan fit, published training runs"


@dataclass(frozen=True, slots=True)
class Observation:
    """One plan with the measured step times of the rows that ran it, and what part of its group it is."""

    plan: Plan
    log_measured_s: float
    group: str
    fold: tuple[str, str]
    weight: float

    @property
    def is_hybrid(self) -> bool:
        """Whether it moves the constants of hybrids, and no others."""
        return self.plan.model.linear_mixer is not None


@dataclass(frozen=True, slots=True)
class FitResult:
    """Values in the order of the constants, errors of each group fitted on all, and fitted without its fold."""

    constants: tuple[FitConstant, ...]
    start: tuple[float, ...]
    values: tuple[float, ...]
    group_errors: dict[str, float]
    held_out_errors: dict[str, float]
    without_model_errors: dict[str, float]


def observations(cases: Sequence[Case]) -> list[Observation]:
    """Cases with equal plans joined: their prediction is one. Weights of a group add up to 1."""
    by_plan: dict[tuple[str, str], list[Case]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    for case in cases:
        by_plan[case.plan.plan_id, case.row.group].append(case)
        sizes[case.row.group] += 1
    return [
        Observation(
            plan=same[0].plan,
            log_measured_s=float(np.mean([math.log(case.published_step_s) for case in same])),
            group=group,
            fold=(same[0].plan.model.name, same[0].plan.hardware),
            weight=len(same) / sizes[group],
        )
        for (_, group), same in by_plan.items()
    ]


@dataclass(eq=False)
class Fit:
    """Predictions of observations as a function of the constants."""

    constants: tuple[FitConstant, ...]
    seen: Sequence[Observation]
    profiles: Mapping[str, HardwareProfile]
    stacks: Mapping[str, SoftwareStack]

    def log_errors(self, values: Sequence[float]) -> Array:
        """Logarithm of predicted over measured, by observation."""
        profiles, stacks = with_values(self.constants, values, self.profiles, self.stacks, REF)
        models: dict[tuple[int, str, str], StepModel] = {}
        errors = []
        for one in self.seen:
            plan = one.plan
            key = (id(plan.model), plan.stack, plan.hardware)
            if key not in models:
                models[key] = StepModel(plan.model, stacks[plan.stack], profiles[plan.hardware])
            step_s = models[key].step_times([plan.point])[0].step_s
            errors.append(math.log(step_s) - one.log_measured_s)
        return np.array(errors)

    @property
    def ranges(self) -> Array:
        return np.array([constant.high - constant.low for constant in self.constants])

    def jacobian(self, values: Array, errors: Array) -> Array:
        """Change of every error over the whole range of a constant, by a step inwards of a fiftieth of it.

        Zero where the observation does not move the constant: to the solution, that constant is what it was.
        """
        columns, is_hybrid = [], np.array([one.is_hybrid for one in self.seen])
        for index, constant in enumerate(self.constants):
            step = self.ranges[index] / 50
            step = -step if values[index] + step > constant.high else step
            moved = values.copy()
            moved[index] += step
            change = (self.log_errors(moved.tolist()) - errors) / step * self.ranges[index]
            columns.append(np.where(is_hybrid == constant.of_hybrids, change, 0.0))
        return np.stack(columns, axis=1)

    def step(self, values: Array, errors: Array, jacobian: Array, start: Array, use: NDArray[np.bool_]) -> Array:
        """Values that solve the linearised problem over the observations in ``use``."""
        low = np.array([constant.low for constant in self.constants])
        at, origin = (values - low) / self.ranges, (start - low) / self.ranges
        weights = np.sqrt(np.array([one.weight for one in self.seen])[use])

        def residuals(position: Array) -> Array:
            predicted = errors[use] + jacobian[use] @ (position - at)
            found: Array = np.concatenate([weights * predicted, PRIOR_WEIGHT * (position - origin)])
            return found

        clipped = np.clip(at, 1e-6, 1 - 1e-6)
        solved = least_squares(residuals, clipped, bounds=(0.0, 1.0), loss="soft_l1", f_scale=ROBUST_SCALE)
        found: Array = low + self.ranges * solved.x
        return found


def fit(
    constants: tuple[FitConstant, ...],
    cases: Sequence[Case],
    profiles: Mapping[str, HardwareProfile],
    stacks: Mapping[str, SoftwareStack],
    progress: Callable[[str], None] = lambda _: None,
) -> FitResult:
    """Fit all, then without each (model, GPU) and without each model: errors of groups the values have not seen.

    A fold's values solve the problem without it, linearised where all are fitted; its errors are exact predictions.
    """
    job = Fit(constants, observations(cases), profiles, stacks)
    start = np.array(current_values(constants, profiles, stacks))
    everything = np.ones(len(job.seen), dtype=bool)
    values, errors = start, job.log_errors(start.tolist())
    for index in range(NUM_STEPS):
        progress(f"step {index + 1} of {NUM_STEPS}")
        values = job.step(values, errors, job.jacobian(values, errors), start, everything)
        errors = job.log_errors(values.tolist())
    jacobian = job.jacobian(values, errors)
    progress("cross-validating")

    def held_out(key: Callable[[Observation], object]) -> dict[str, float]:
        found = np.zeros(len(job.seen))
        for fold in {key(one) for one in job.seen}:
            inside = np.array([key(one) == fold for one in job.seen])
            fold_values = job.step(values, errors, jacobian, start, ~inside)
            part = Fit(constants, [one for one in job.seen if key(one) == fold], profiles, stacks)
            found[inside] = part.log_errors(fold_values.tolist())
        return _by_group(job.seen, found)

    return FitResult(
        constants=constants,
        start=tuple(start.tolist()),
        values=tuple(values.tolist()),
        group_errors=_by_group(job.seen, errors),
        held_out_errors=held_out(lambda one: one.fold),
        without_model_errors=held_out(lambda one: one.fold[0]),
    )


def _by_group(seen: Sequence[Observation], log_errors: Array) -> dict[str, float]:
    """Median error fraction of each group."""
    found: dict[str, list[float]] = defaultdict(list)
    for one, error in zip(seen, log_errors, strict=True):
        found[one.group].append(math.expm1(error))
    return {group: median(errors) for group, errors in found.items()}
