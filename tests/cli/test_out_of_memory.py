"""``moeplan run`` out of memory: predicted beside needed, and a plan file that fits."""

from pathlib import Path
from typing import Any

import pytest

import moeplan.executor.launch as launch_module
from moeplan.cli import out_of_memory
from moeplan.cli.inputs import load_plan
from moeplan.errors import OutOfMemoryError
from moeplan.files import toml_text, write_text_atomically
from moeplan.hwprofiles.load import load_profile
from moeplan.plan import Plan
from moeplan.planner.nearest import nearest_fit
from moeplan.presets import load_model
from moeplan.units import format_bytes
from tests.cli.conftest import Cli

NEEDED = {"weights": 9e9, "gradients": 18e9, "optimizer": 55e9, "activations": 70e9, "framework": 2e9}


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    plan = Plan(model=load_model("h200-coarse"), hardware="h200", num_gpus=1, seq_len=4096, global_batch_size=32, mbs=8)
    path = tmp_path / "plan.toml"
    write_text_atomically(path, toml_text(plan))
    return path


def fail(monkeypatch: pytest.MonkeyPatch, memory_bytes: dict[str, float]) -> None:
    def launch(*_arguments: object, **_options: object) -> bool:
        raise OutOfMemoryError("rank 0 ran out of memory: it needed at least 143.4 GiB", "h", memory_bytes)

    monkeypatch.setattr(launch_module, "launch", launch)


def test_predicted_beside_needed_and_the_nearest_plan(
    cli: Cli, plan_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, NEEDED)
    needed: list[float] = []

    def noted(*arguments: Any, used_bytes: float) -> Any:
        needed.append(used_bytes)
        return nearest_fit(*arguments, used_bytes=used_bytes)

    monkeypatch.setattr(out_of_memory, "nearest_fit", noted)
    outcome = cli("run", str(plan_path), "--out", str(tmp_path / "out.json"))
    text = " ".join(outcome.err.split())
    assert outcome.code == 1
    assert "rank 0 ran out of memory: it needed at least 143.4 GiB; predicted " in text
    assert "weights 8.6 GiB" in text
    assert f"of the {format_bytes(load_profile('h200').memory_bytes.value)} of h200" in text
    assert "the nearest plan that fits is in" in text
    nearest, plan = load_plan(tmp_path / "out-fits.toml"), load_plan(plan_path)
    assert nearest.plan_id != plan.plan_id
    assert needed == [sum(NEEDED.values())]
    assert (nearest.model, nearest.num_gpus, nearest.seq_len) == (plan.model, 1, 4096)


def test_no_plan_of_these_ranks(cli: Cli, plan_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, {**NEEDED, "activations": 9e12})
    outcome = cli("run", str(plan_path), "--out", str(tmp_path / "out.json"))
    assert outcome.code == 1
    assert "no plan of these ranks fits" in outcome.err
    assert not (tmp_path / "out-fits.toml").exists()
