"""Predictions: step times of many candidate points for a search, and all figures of one plan."""

from collections.abc import Sequence

from moeplan.errors import InvalidInputError
from moeplan.flops import training_flops_per_token
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.point import Point
from moeplan.results import FamilyTime, Figures
from moeplan.simulator.doubt import doubt
from moeplan.simulator.dynamic_cp import dynamic_step_time, memory_point
from moeplan.simulator.memory import memory_by_rank
from moeplan.simulator.op import Timeline
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.step_model import StepTime, step_model
from moeplan.simulator.trace import step_timeline
from moeplan.vocabulary import OP_FAMILIES


def step_times(
    model: ModelSpec, points: Sequence[Point], stack: SoftwareStack, profile: HardwareProfile
) -> list[StepTime]:
    """Step time of every point, in order. Costs of layers are kept between calls with the same objects."""
    return step_model(model, stack, profile).step_times(points)


def predict(plan: Plan, profile: HardwareProfile, stack: SoftwareStack) -> Figures:
    """All figures of one plan. Family seconds are means over pipeline ranks; exposed ones add up to the step.

    A plan that its stack or machine would not run is predicted as if they did, and ``refusals`` says why they do not.
    """
    model = step_model(plan.model, stack, profile)
    if plan.dynamic_cp:
        time, held = dynamic_step_time(plan, profile, stack), memory_point(plan)
    else:
        time, held = model.step_times([plan.point])[0], plan.point
    trust = doubt(model, held)
    memory = memory_by_rank(plan.model, held, stack, profile)
    flops_per_token = training_flops_per_token(plan.model, plan.seq_len, plan.flop_lengths)
    tokens_per_s_per_gpu = plan.tokens_per_step / time.step_s / plan.num_gpus
    return Figures(
        kind="prediction",
        plan_id=plan.plan_id,
        stack=stack.name,
        hardware=profile.name,
        step_s=time.step_s,
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        model_tflops_per_gpu=tokens_per_s_per_gpu * flops_per_token / 1e12,
        peak_memory_bytes=max(sum(column) for column in zip(*memory.values(), strict=True)),
        memory_bytes=memory,
        time_s={
            family: FamilyTime(total_s=float(time.total_s[index]), exposed_s=float(time.exposed_s[index]))
            for index, family in enumerate(OP_FAMILIES)
        },
        error_bar_frac=trust.error_bar_frac,
        provenance={"stack": stack.source, "hardware": profile.description, **trust.source_shares},
        notes=trust.notes,
        refusals=stack.refusals(plan.model, plan.point, profile),
    )


def timeline(plan: Plan, profile: HardwareProfile, stack: SoftwareStack) -> Timeline:
    """When every chunk of one step runs on every pipeline rank, and the ops of the first micro-batch.

    Raises InvalidInputError for a plan with dynamic_cp, whose micro-batches differ.
    """
    if plan.dynamic_cp:
        raise InvalidInputError(
            "dynamic_cp: got true, allowed in a timeline: plans whose micro-batches are alike",
            "leave the trace out, or predict the plan without dynamic_cp",
        )
    return step_timeline(step_model(plan.model, stack, profile), plan.point)
