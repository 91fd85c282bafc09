"""``moeplan compare``: two plans, predictions, measurements or locks, side by side."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeplan.cli.inputs import load_machine, load_plan
from moeplan.comparison import compare
from moeplan.errors import InvalidInputError
from moeplan.files import read_json, validate
from moeplan.lock import read_lock
from moeplan.plan import Plan
from moeplan.report.compare import print_side_by_side
from moeplan.report.output import print_json
from moeplan.results import Figures
from moeplan.simulator.predict import predict


@dataclass(frozen=True, slots=True)
class Side:
    """One thing to compare; ``plan`` is None where only figures were recorded."""

    label: str
    figures: Figures
    plan: Plan | None = None


def run_compare(first: Path, second: Path, as_json: bool) -> None:
    """Print every figure of both, what changed in the plan, and which families moved the step."""
    pairs = list(_pairs(load_sides(first), load_sides(second)))
    if not pairs:
        raise InvalidInputError(f"{first} and {second} have no plan in common", "compare locks of the same plans")
    documents = []
    for before, after in pairs:
        changes = plan_changes(before.plan, after.plan)
        comparison = compare(after.figures, before.figures, {})
        documents.append({"changes": changes, "comparison": comparison.model_dump(mode="json")})
        if not as_json:
            print_side_by_side(before.label, after.label, changes, comparison)
    if as_json:
        print_json(documents)


def load_sides(path: Path) -> list[Side]:
    """What a file holds: a plan (then predicted), figures, the JSON of predict or run, or every entry of a lock."""
    if path.suffix == ".toml":
        plan = load_plan(path)
        return [Side(str(path), predict(plan, *load_machine(plan, "")), plan)]
    data: Any = read_json(path)
    if isinstance(data, dict) and "lock_version" in data:
        return [Side(f"{path} {entry.plan.plan_id}", entry.recorded, entry.plan) for entry in read_lock(path).entries]
    if isinstance(data, dict):
        figures = data.get("measured") or data.get("predicted") or data
        of_plan = validate(Plan, data["plan"], str(path)) if "plan" in data else None
        return [Side(str(path), validate(Figures, figures, str(path)), of_plan)]
    raise InvalidInputError(f"{path} holds neither a plan, figures nor a lock", "give a plan TOML or a result JSON")


def _pairs(first: list[Side], second: list[Side]) -> Iterator[tuple[Side, Side]]:
    """Locks pair by plan; single things pair with each other."""
    if len(first) == len(second) == 1:
        yield first[0], second[0]
        return
    after = {side.figures.plan_id: side for side in second}
    for side in first:
        if side.figures.plan_id in after:
            yield side, after[side.figures.plan_id]


def plan_changes(before: Plan | None, after: Plan | None) -> dict[str, tuple[Any, Any]]:
    """Fields in which two plans differ, as (before, after)."""
    if before is None or after is None:
        return {}
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    changes = {key: (old[key], new[key]) for key in old if key != "model" and old[key] != new[key]}
    models = {f"model.{key}": (value, new["model"].get(key)) for key, value in old["model"].items()}
    return changes | {key: (one, other) for key, (one, other) in models.items() if one != other}
