"""Why a plan is as it is: what one changed axis, or one missing technique, would do to each wall."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.planner.families import stack_features
from moeplan.planner.space import absent_modules, dispatch_fields, precisions_of, vp_values
from moeplan.results import Figures
from moeplan.simulator.backward_ops import backward_ops
from moeplan.simulator.graph import critical_path
from moeplan.simulator.layer_ops import forward_ops
from moeplan.simulator.op import OpRun
from moeplan.simulator.op_shapes import OpShape
from moeplan.simulator.predict import predict
from moeplan.simulator.stack import SoftwareStack
from moeplan.simulator.step_model import step_model
from moeplan.vocabulary import PARTIAL_GRAPH, PRECISIONS

OVERLAPS = (
    *("ep_overlap", "delay_wgrad", "shared_expert_overlap", "tp_comm_overlap"),
    *("overlap_grad_reduce", "overlap_param_gather"),
)
NOTHING_IN_BF16: dict[str, Any] = {"bf16_first_layers": 0, "bf16_last_layers": 0, "bf16_modules": ()}
DEGREES = ("tp", "cp", "pp", "etp", "ep", "mbs")


@dataclass(frozen=True, slots=True)
class Variant:
    """A plan with one thing changed. ``problem`` says why it cannot be, and then nothing is predicted."""

    change: str
    predicted: Figures | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CriticalPhase:
    """The critical path of one phase of one kind of part: its ops in order, and the seconds of the phase alone."""

    part: str
    phase: str
    seconds: float
    path: tuple[OpRun, ...]

    @property
    def by_family(self) -> dict[tuple[str, str], float]:
        """Seconds on the path by stream and op family, largest first."""
        sums: dict[tuple[str, str], float] = {}
        for run in self.path:
            key = (run.op.stream, run.op.family)
            sums[key] = sums.get(key, 0.0) + run.cost.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def critical_phases(plan: Plan, profile: HardwareProfile, stack: SoftwareStack) -> list[CriticalPhase]:
    """Forward and backward of every kind of layer of the plan, without overlap with the other direction."""
    model, shape = step_model(plan.model, stack, profile), OpShape.of(plan.point, stack, profile)
    found: dict[str, CriticalPhase] = {}
    parts = {part for stage in model.stage_parts(plan.point) for part in stage if part.layer_kind is not None}
    for part in sorted(parts, key=lambda one: (one.label, one.layer)):
        its_shape = shape.of_layer(part)
        time, ops = model.part_time(part, its_shape), forward_ops(plan.model, part, its_shape, stack)
        backward = backward_ops(ops, its_shape, stack.time)
        for phase, one, its_ops in (("forward", time.forward, ops), ("backward", time.backward, backward)):
            critical = CriticalPhase(part.label, phase, one.seconds, critical_path(one, its_ops))
            found.setdefault(f"{part.label} {phase}", critical)
    return list(found.values())


def neighbours(plan: Plan, profile: HardwareProfile, stack: SoftwareStack) -> list[Variant]:
    """The plan with each axis one step up and down; the layout and the degrees that follow are derived again."""
    return [_variant(plan, change, fields, profile, stack) for change, fields in _steps(plan, profile, stack)]


def ablations(plan: Plan, profile: HardwareProfile, stack: SoftwareStack) -> list[Variant]:
    """The plan without one technique at a time, each where the plan has it; what depends on it goes too."""
    low_precision = {"precision": "bf16", "fp8_primary_weights": False, "fp8_attention": False, **NOTHING_IN_BF16}
    changes: tuple[tuple[str, bool, dict[str, Any]], ...] = (
        ("without overlap", any(getattr(plan, key) for key in OVERLAPS), dict.fromkeys(OVERLAPS, False)),
        ("without low precision", PRECISIONS[plan.precision].quantized_bytes is not None, low_precision),
        ("without CUDA graphs", bool(plan.cuda_graph), {"cuda_graph": ()}),
        (
            "without a deduplicating dispatcher",
            plan.model.moe is not None and plan.dispatcher == "flex",
            {"dispatcher": "alltoall", "dispatch_sms": 0, "cuda_graph": ()},
        ),
    )
    found = [
        _variant(plan, name, fields | {"layout": plan.layout}, profile, stack)
        for name, is_used, fields in changes
        if is_used
    ]
    return [*_without_grouped_gemm(plan, profile, stack), *found]


def _without_grouped_gemm(plan: Plan, profile: HardwareProfile, stack: SoftwareStack) -> Iterator[Variant]:
    """Local experts one after another; graphs that hold experts, and kernels that fuse them, go too."""
    moe = plan.model.moe
    if moe is None or moe.num_experts == plan.ep:
        return
    if "full_iteration" in plan.cuda_graph:
        graph = PARTIAL_GRAPH
    else:
        graph = tuple(scope for scope in plan.cuda_graph if scope != "moe")
    fields = {"fused_grouped_mlp": False, "cuda_graph": graph, "layout": plan.layout}
    yield _variant(plan, "without grouped GEMM", fields, profile, stack.without_grouped_gemm())


def _steps(plan: Plan, profile: HardwareProfile, stack: SoftwareStack) -> Iterator[tuple[str, dict[str, Any]]]:
    for axis in DEGREES:
        value = getattr(plan, axis)
        for other in (value // 2, value * 2):
            if other:
                yield f"{axis} {value} -> {other}", {axis: other} | ({"vp": 1} if axis == "pp" and other == 1 else {})
    ladder = vp_values(plan.model, plan.pp)
    fewer, more = [vp for vp in ladder if vp < plan.vp], [vp for vp in ladder if vp > plan.vp]
    for other in (*fewer[-1:], *more[:1]):
        yield f"vp {plan.vp} -> {other}", {"vp": other}
    for kind in stack.cp_comm if plan.cp > 1 else ():
        if kind not in (plan.cp_comm, "a2a+p2p"):
            yield f"cp_comm {plan.cp_comm} -> {kind}", {"cp_comm": kind, "cp_a2a_size": 1, "layout": plan.layout}
    for change, fields in (*_precisions(plan, profile, stack), *_dispatchers(plan, stack)):
        chosen = plan.point.as_dict() | fields
        yield change, fields | stack_features(stack, plan.model, profile, chosen) | {"layout": plan.layout}
    absent = absent_modules(plan.model)
    for module in stack.recompute:
        if module in absent:
            continue
        if module in plan.recompute:
            change, kept = f"no recompute of {module}", set(plan.recompute) - {module}
        else:
            change, kept = f"recompute {module}", {module} if module == "full" else {*plan.recompute, module} - {"full"}
        yield change, {"recompute": tuple(kept), "layout": plan.layout}


def _precisions(plan: Plan, profile: HardwareProfile, stack: SoftwareStack) -> Iterator[tuple[str, dict[str, Any]]]:
    for precision in precisions_of(stack, profile):
        if precision != plan.precision:
            yield f"precision {plan.precision} -> {precision}", {"precision": precision}


def _dispatchers(plan: Plan, stack: SoftwareStack) -> Iterator[tuple[str, dict[str, Any]]]:
    own = stack.dispatch_backend(plan.point)
    for backend in stack.dispatchers if plan.model.moe else ():
        if backend != own:
            yield f"dispatcher {own} -> {backend}", dispatch_fields(backend)


def _variant(
    plan: Plan, change: str, fields: dict[str, Any], profile: HardwareProfile, stack: SoftwareStack
) -> Variant:
    try:
        changed = plan.replace(**fields)
    except ValidationError as error:
        return Variant(change, None, error.errors()[0]["msg"].removeprefix("Value error, "))
    for refusal in stack.refusals(changed.model, changed.point, profile):
        return Variant(change, None, refusal)
    return Variant(change, predict(changed, profile, stack))
