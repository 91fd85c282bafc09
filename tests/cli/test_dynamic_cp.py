"""``moeplan explain --dynamic-cp``."""

import json
from pathlib import Path

import pytest

from moeplan.files import toml_text
from moeplan.plan import Plan
from moeplan.presets import load_model
from tests.cli.conftest import Cli


@pytest.fixture
def long_plan(tmp_path: Path) -> Path:
    """Qwen3-30B at 32K on 16 H100."""
    plan = Plan(
        model=load_model("qwen3-30b-a3b"),
        hardware="h100",
        stack="megatron-bridge-26.08",
        num_gpus=16,
        seq_len=32768,
        global_batch_size=16,
        cp=8,
        ep=8,
    )
    path = tmp_path / "long.toml"
    path.write_text(toml_text(plan))
    return path


def test_both_schedules_are_shown(cli: Cli, long_plan: Path, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("32768\n" + "1024\n\n" * 60)
    shown = cli("explain", str(long_plan), "--dynamic-cp", str(lengths))
    assert shown.code == 0
    assert "61 documents of 1024 to 32768 tokens" in shown.out
    assert "static, cp 8" in shown.out
    found = json.loads(cli("explain", str(long_plan), "--dynamic-cp", str(lengths), "--json").out)
    assert found["speed_up"] == pytest.approx(found["static"]["step_s"] / found["dynamic"]["step_s"])
    packs = [pack for one in found["dynamic"]["micro_batches"] for pack in one]
    assert sum(len(pack["lengths"]) for pack in packs) == 61
    wider = cli("explain", str(long_plan), "--dynamic-cp", str(lengths), "--max-tokens-per-rank", "8192", "--json")
    assert json.loads(wider.out)["max_tokens_per_rank"] == 8192


@pytest.mark.parametrize(
    "text, named",
    [
        ("12\nmany\n", "line 2: got 'many'"),
        ("", "no document"),
        ("40000\n", "seq_len 32768"),
        ("9" * 5000, "line 1: got '999"),
        ("caf\xe9", "readable text file"),
    ],
)
def test_a_bad_file_is_one_error(cli: Cli, long_plan: Path, tmp_path: Path, text: str, named: str) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_bytes(text.encode("latin-1"))
    refused = cli("explain", str(long_plan), "--dynamic-cp", str(lengths))
    assert refused.code == 2
    assert named in refused.err
    assert "hint:" in refused.err
