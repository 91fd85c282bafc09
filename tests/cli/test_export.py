"""``moeplan export``: files of other programs, and plans they cannot say."""

import json
import subprocess
from pathlib import Path

import pytest

from moeplan.files import toml_text
from moeplan.plan import Plan
from moeplan.presets import load_model
from tests.cli.conftest import Cli
from tests.cli.test_errors import assert_one_error


@pytest.fixture
def native_plan(tmp_path: Path) -> Path:
    plan = Plan(
        model=load_model("qwen3-30b-a3b"),
        hardware="h100",
        num_gpus=16,
        seq_len=4096,
        global_batch_size=256,
        pp=2,
        ep=8,
    )
    path = tmp_path / "native.toml"
    path.write_text(toml_text(plan))
    return path


def test_a_slurm_job_has_all_that_it_starts(cli: Cli, native_plan: Path, tmp_path: Path) -> None:
    run = tmp_path / "settings.toml"
    run.write_text('steps = 1000\nsave_folder = "saved"\nsave_every = 100\n')
    out = tmp_path / "job"
    outcome = cli("export", str(native_plan), "--to", "slurm", "--run-config", str(run), "--out", str(out), "--json")
    assert outcome.code == 0, outcome.err
    names = {"job.sbatch", "plan.toml", "run.toml", "resume.toml"}
    assert (
        {Path(file).name for file in json.loads(outcome.out)["files"]} == {path.name for path in out.iterdir()} == names
    )
    script = (out / "job.sbatch").read_text()
    assert "#SBATCH --nodes=2\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "resume = true" in (out / "resume.toml").read_text()
    assert subprocess.run(["bash", "-n", str(out / "job.sbatch")], check=False).returncode == 0


def test_the_slurm_job_starts_torchrun_on_every_host(native_plan: Path, cli: Cli, tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands: what would be started, before and after there is a checkpoint."""
    run, out = tmp_path / "settings.toml", tmp_path / "job"
    run.write_text('save_folder = "saved"\n')
    assert cli("export", str(native_plan), "--to", "slurm", "--run-config", str(run), "--out", str(out)).code == 0
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, line in (("scontrol", "echo host7; sleep 0.05; echo host8"), ("srun", 'echo "$@"')):
        (tools / name).write_text(f"#!/bin/bash\n{line}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "host[7-8]", "SLURM_JOB_ID": "42"}
    environment["SLURM_JOB_NUM_NODES"] = "2"

    def started() -> str:
        return subprocess.run(
            ["bash", "job.sbatch"], cwd=out, env=environment, check=True, capture_output=True, text=True
        ).stdout

    first = started()
    assert "torchrun --nnodes=2 --nproc-per-node=8" in first
    assert "--rdzv-id=42-0 --rdzv-endpoint=host7:29400" in first
    assert "plan.toml --run-config run.toml --out measurement.json" in first
    (out / "saved").mkdir()
    (out / "saved" / "LATEST").touch()
    assert "--run-config resume.toml" in started()


def test_megatron_flags_say_the_plan(cli: Cli, plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "megatron"
    assert cli("export", str(plan_file), "--to", "megatron-lm", "--out", str(out)).code == 0
    script = (out / "pretrain.sh").read_text()
    assert subprocess.run(["bash", "-n", str(out / "pretrain.sh")], check=False).returncode == 0
    for flag in (
        "--expert-model-parallel-size 64",
        "--pipeline-model-parallel-size 4",
        "--pipeline-model-parallel-layout 'Et*4|(tttt|)*14tmL'",
        "--num-experts 256",
        "--moe-layer-freq '[0,0,0,1",
        "--moe-router-group-topk 4",
        "--kv-lora-rank 512",
        "--use-distributed-optimizer",
        "--mtp-num-layers 1",
        "--global-batch-size 8192",
    ):
        assert f"  {flag}" in script, flag
    assert "--nnodes=64 --nproc-per-node=4" in script


def test_what_a_format_cannot_say_is_refused_and_nothing_is_written(
    cli: Cli, plan_file: Path, native_plan: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for path, target, named in (
        (plan_file, "slurm", "megatron-bridge-26.08"),
        (native_plan, "nemo", "slurm, megatron-lm"),
        (native_plan, "slurm,nemo", "nemo"),
    ):
        outcome = cli("export", str(path), "--to", target, "--out", str(out))
        assert_one_error(outcome.code, outcome.err, named)
        assert not out.exists()
