"""Exporters over every preset: each model either has its flags or is refused with the key."""

import pytest

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.load import load_profile
from moeplan.plan import Plan
from moeplan.planner.export import EXPORTERS, ExportJob, export
from moeplan.presets import load_model, model_names
from moeplan.run_config import RunConfig


def job(**changes: object) -> ExportJob:
    fields = {"model": load_model("qwen3-30b-a3b"), "hardware": "h100", "num_gpus": 8, "seq_len": 4096}
    plan = Plan.model_validate(fields | {"global_batch_size": 64} | changes)
    return ExportJob(plan, RunConfig(), load_profile(plan.hardware))


# Experts with biases, GeGLU, or YaRN outside of latent attention.
NOT_IN_MEGATRON = {"gpt-oss-120b", "gpt-oss-20b", "grok1-314b"}


@pytest.mark.parametrize("name", model_names())
def test_every_preset_has_flags_or_a_reason(name: str) -> None:
    if name in NOT_IN_MEGATRON:
        with pytest.raises(InvalidInputError, match=r"^model\."):
            export(job(model=load_model(name)), "megatron-lm")
        return
    (script,) = export(job(model=load_model(name)), "megatron-lm").values()
    flags = [line.split()[0] for line in script.splitlines() if line.startswith("  --")]
    assert len(flags) == len(set(flags)), "a flag is given twice"
    assert "--num-layers" in flags


@pytest.mark.parametrize(
    "change, flag",
    [
        ({"precision": "mxfp8", "hardware": "b200"}, "--fp8-recipe mxfp8"),
        ({"recompute": ("full",)}, "--recompute-granularity full"),
        ({"recompute": ("moe_act", "layernorm")}, "--recompute-modules layernorm moe_act"),
        ({"dispatcher": "flex", "flex_backend": "deepep", "ep": 8}, "--moe-flex-dispatcher-backend deepep"),
        ({"ep": 8, "shared_expert_overlap": True, "model": load_model("deepseek-v2-lite")}, "--moe-shared-expert-ov"),
        ({"routing": "drop"}, "--moe-token-drop-policy probs"),
        ({"cp": 2}, "--cp-comm-type p2p"),
        ({"sharding": "full"}, "--data-parallel-sharding-strategy optim_grads_params"),
        ({"moment_dtype": "bf16"}, "--exp-avg-dtype bf16"),
        ({"optimizer_cpu_frac": 0.5}, "--optimizer-offload-fraction 0.5"),
        ({"cuda_graph": ("attn", "moe_router")}, "--cuda-graph-modules attn moe_router"),
    ],
)
def test_each_choice_of_a_plan_has_its_flag(change: dict[str, object], flag: str) -> None:
    (script,) = export(job(**change), "megatron-lm").values()
    assert f"  {flag}" in script


def test_what_megatron_has_no_word_for_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="flex_backend: got 'torch'"):
        export(job(dispatcher="flex", flex_backend="torch", ep=8), "megatron-lm")
    with pytest.raises(InvalidInputError, match="offload_layers: got 2"):
        export(job(offload_layers=2), "megatron-lm")


@pytest.mark.parametrize("target", EXPORTERS)
def test_hosts_must_be_full(target: str) -> None:
    with pytest.raises(InvalidInputError, match="12 GPUs do not fill hosts of 8"):
        export(job(num_gpus=12, global_batch_size=96), target)


def test_a_job_trains_in_the_environment_of_a_run() -> None:
    from moeplan.executor.launch import ALLOCATOR_VARIABLE, GROWING_SEGMENTS

    files = export(job(stack="native"), "slurm")
    (exports,) = (line for line in files["job.sbatch"].splitlines() if line.startswith("export "))
    assert f"{ALLOCATOR_VARIABLE}={GROWING_SEGMENTS}" in exports.split()
