"""``moeplan predict``."""

from pathlib import Path

from moeplan.cli.inputs import load_machine, load_plan
from moeplan.files import write_text_atomically
from moeplan.report.output import print_json
from moeplan.report.prediction import print_prediction
from moeplan.simulator.predict import predict, timeline
from moeplan.simulator.trace import trace_json


def run_predict(path: Path, hardware: str, trace: Path | None, as_json: bool) -> None:
    """Predict one plan, print it, write a trace."""
    plan = load_plan(path)
    profile, stack = load_machine(plan, hardware)
    predicted = predict(plan, profile, stack)
    if trace is not None:
        write_text_atomically(trace, trace_json(timeline(plan, profile, stack)))
    if as_json:
        print_json(
            {
                "plan_id": plan.plan_id,
                "plan": plan.model_dump(mode="json"),
                "predicted": predicted.model_dump(mode="json"),
            }
        )
    else:
        print_prediction(plan, profile, predicted)
