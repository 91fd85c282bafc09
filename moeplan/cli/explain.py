"""``moeplan explain``."""

from pathlib import Path
from typing import Any

from moeplan.cli.inputs import load_machine, load_plan
from moeplan.planner.explain import CriticalPhase, Variant, ablations, critical_phases, neighbours
from moeplan.report.explain import print_critical, print_variants
from moeplan.report.output import print_json
from moeplan.report.prediction import print_headline
from moeplan.simulator.predict import predict


def run_explain(path: Path, hardware: str, *, ablate: bool, as_json: bool) -> None:
    """Print what each changed axis, or each missing technique, would do to the walls of a plan."""
    plan = load_plan(path)
    profile, stack = load_machine(plan, hardware)
    base = predict(plan, profile, stack)
    variants = (ablations if ablate else neighbours)(plan, profile, stack)
    critical = critical_phases(plan, profile, stack)
    if as_json:
        print_json(
            {
                "plan_id": plan.plan_id,
                "predicted": base.model_dump(mode="json"),
                "variants": [_as_json(one) for one in variants],
                "critical_path": [_phase_json(one) for one in critical],
            }
        )
        return
    print_headline(plan, profile, base)
    title = "Without one technique at a time" if ablate else "One step along each axis"
    print_variants(title, base, variants, profile.memory_bytes.value)
    print_critical(critical)


def _phase_json(phase: CriticalPhase) -> dict[str, Any]:
    path = [
        {"op": run.op.name, "stream": run.op.stream, "family": run.op.family, "seconds": run.cost.seconds}
        for run in phase.path
    ]
    return {"part": phase.part, "phase": phase.phase, "seconds": phase.seconds, "path": path}


def _as_json(variant: Variant) -> dict[str, Any]:
    predicted = variant.predicted.model_dump(mode="json") if variant.predicted else None
    return {"change": variant.change, "problem": variant.problem, "predicted": predicted}
