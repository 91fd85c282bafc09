"""Runs the command line in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from moeplan.cli.app import main
from moeplan.files import toml_text
from moeplan.plan import Plan
from moeplan.presets import load_model


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit code and what was printed."""

    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """``cli("search", "--model", ...)``."""

    def run(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as raised:
            main(list(arguments))
        printed = capsys.readouterr()
        code = raised.value.code
        return Outcome(code if isinstance(code, int) else 0, printed.out, printed.err)

    return run


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """The plan of the report: DeepSeek-V3 on 256 GB300."""
    plan = Plan(
        model=load_model("deepseek-v3"),
        hardware="gb300",
        stack="megatron-bridge-26.08",
        num_gpus=256,
        seq_len=4096,
        global_batch_size=8192,
        pp=4,
        vp=4,
        ep=64,
        memory_efficient_permutation=False,
    )
    path = tmp_path / "plan.toml"
    path.write_text(toml_text(plan))
    return path
