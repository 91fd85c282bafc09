"""A Slurm job that trains a plan with the native executor."""

from collections.abc import Mapping

from moeplan.errors import InvalidInputError
from moeplan.files import toml_text
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from moeplan.run_environment import RUN_ENVIRONMENT

# Before the job's time is over: for a save, which waits for the step under way.
_WARNING_S = 300
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", **RUN_ENVIRONMENT}

_SCRIPT = """\
#!/bin/bash
# Trains plan {plan_id} ({model} on {num_gpus} x {hardware}). The folder of this script must be on a file system that
# all hosts share. Submit it from there: sbatch job.sbatch
#SBATCH --job-name={model}-{plan_id}
#SBATCH --nodes={num_hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# SIGTERM this many seconds before the end: every rank saves its state and stops.
#SBATCH --signal=TERM@{warning_s}
#SBATCH --requeue

set -euo pipefail

read -r first_host < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
{environment}
{resume}
srun --kill-on-bad-exit=1 torchrun \\
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={gpus} \\
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" --rdzv-endpoint="$first_host:29400" \\
  -m moeplan.executor.worker plan.toml --run-config {run_config} --out measurement.json
"""

_RESUME = """\
# A job that is started again goes on from its last checkpoint.
run_config=run.toml
if [[ -e {save_folder}/LATEST ]]; then run_config=resume.toml; fi
"""


def slurm_files(plan: Plan, run: RunConfig, gpus_per_host: int) -> Mapping[str, str]:
    """The job, the plan, and the settings of the run (and of its resumption). Only for plans of the native stack."""
    if plan.stack != "native":
        raise InvalidInputError(
            f"stack: got {plan.stack!r}, allowed: native for a job that trains with moeplan",
            "search again with --stack native, or export --to megatron-lm",
        )
    saves = bool(run.save_folder)
    script = _SCRIPT.format(
        plan_id=plan.plan_id,
        model=plan.model.name,
        hardware=plan.hardware,
        num_gpus=plan.num_gpus,
        num_hosts=plan.num_gpus // gpus_per_host,
        gpus=gpus_per_host,
        warning_s=_WARNING_S,
        environment=" ".join(["export", *(f"{key}={value}" for key, value in _ENVIRONMENT.items())]),
        resume=_RESUME.format(save_folder=run.save_folder) if saves else "",
        run_config='"$run_config"' if saves else "run.toml",
    )
    files = {"job.sbatch": script, "plan.toml": toml_text(plan), "run.toml": toml_text(run)}
    if saves:
        files["resume.toml"] = toml_text(run.model_copy(update={"resume": True}))
    return files
