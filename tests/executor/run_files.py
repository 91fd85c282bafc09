"""Files of a run, as the launcher reads them."""

from pathlib import Path
from typing import Any

from moeplan.files import toml_text
from moeplan.plan import Plan
from moeplan.run_config import RunConfig


def files(folder: Path, plan: Plan, **run: Any) -> tuple[Path, Path, Path]:
    """Paths of plan, run settings and measurement."""
    plan_path, run_path = folder / "plan.toml", folder / "run.toml"
    plan_path.write_text(toml_text(plan), encoding="utf-8")
    run_path.write_text(toml_text(RunConfig.model_validate(run)), encoding="utf-8")
    return plan_path, run_path, folder / "measurement.json"
