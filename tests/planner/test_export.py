"""Exporters over every preset: each model either has its flags or is refused with the key."""

import re
from typing import Any

import pytest

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.load import load_profile
from moeplan.model_spec import Llama3Scaling, YarnScaling
from moeplan.plan import Plan
from moeplan.planner.export import EXPORTERS, ExportJob, export
from moeplan.presets import load_model, model_names
from moeplan.run_config import RunConfig
from moeplan.run_environment import RUN_ENVIRONMENT


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
    assert ("--hybrid-layer-pattern" if load_model(name).layer_pattern else "--num-layers") in flags


def test_a_hybrid_is_a_pattern_that_says_its_stages() -> None:
    model = load_model("nemotron3-super-120b-a12b")
    changes: dict[str, object] = {"precision": "nvfp4", "hardware": "gb200", "ep": 8, "stack": "megatron-bridge-26.08"}
    changes |= {"bf16_last_layers": 14, "bf16_modules": ("linear_out", "mtp")}
    one = job(model=model, layout="Et*88mmL", **changes)
    files = export(one, "megatron-lm")
    assert "  pretrain_hybrid.py \\" in files["pretrain.sh"]
    for flag in (
        f"--hybrid-layer-pattern '{model.layer_pattern}/*E/*E'",
        "--mamba-num-heads 128",
        "--moe-latent-size 1024",
        "--mtp-use-repeated-layer",
        "--position-embedding-type none",
        "--num-layers-at-end-in-bf16 14",
        "--te-precision-config-file wide_modules.yaml",
    ):
        assert f"  {flag}" in files["pretrain.sh"]
    wide = files["wide_modules.yaml"]
    assert re.findall(r'pattern: "(\S+)"\n +config: "(\w+)"', wide) == [
        ("*mixer.out_proj", "mxfp8"),
        ("*mtp.layers.*", "bf16"),
    ]
    halves = job(model=model, num_gpus=16, pp=2, layout="Et*44|t*44mmL", **changes)
    pattern = f"{model.layer_pattern[:44]}|{model.layer_pattern[44:]}/*E/*E"
    assert f"--hybrid-layer-pattern '{pattern}'" in export(halves, "megatron-lm")["pretrain.sh"]
    with pytest.raises(InvalidInputError, match="runs MTP depths of a hybrid on the last stage"):
        export(job(model=model, num_gpus=16, pp=2, layout="Et*88mm|L", **changes), "megatron-lm")


def test_a_gated_delta_net_has_flags_of_its_own() -> None:
    script = export(job(model=load_model("qwen3-next-80b-a3b")), "megatron-lm")["pretrain.sh"]
    for flag in ("experimental-attention-variant gated_delta_net", "linear-attention-freq 4", "attention-output-gate"):
        assert f"  --{flag}" in script


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


@pytest.mark.parametrize(
    "run, flags",
    [
        ({}, ["--lr-decay-style cosine", "--lr-decay-iters 50", "--eval-iters 0"]),
        ({"lr_schedule": "wsd", "lr_cooldown_steps": 9}, ["--lr-decay-style WSD", "--lr-wsd-decay-iters 9"]),
        ({"separate_documents": True}, ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]),
        ({"lr_decay_steps": 70, "eval_every": 5}, ["--lr-decay-iters 70", "--eval-interval 5", "--eval-iters 1"]),
    ],
)
def test_settings_of_the_run_have_their_flags(run: dict[str, object], flags: list[str]) -> None:
    one = job()
    (script,) = export(ExportJob(one.plan, RunConfig.model_validate(run), one.profile), "megatron-lm").values()
    assert set(flags) <= {line.strip(" \\") for line in script.splitlines()}


# One legal value of each, of a model with MLA, shared experts and MTP on tp 2, cp 2, ep 8 in FP8.
OTHERWISE: dict[str, object] = {
    "seq_len": 8192,
    "global_batch_size": 128,
    "mbs": 2,
    "tp": 1,
    "cp": 1,
    "cp_comm": "all_gather",
    "pp": 2,
    "etp": 2,
    "ep": 16,
    "precision": "bf16",
    "packed_lengths": (1024, 3072),
    "recompute": ("full",),
    "dispatcher": "allgather",
    "sharding": "none",
    "dp_replicate": 2,
    "grad_dtype": "bf16",
    "moment_dtype": "bf16",
    "main_weight_remainders": True,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "ep_overlap": True,
    "shared_expert_overlap": True,
    "echo_slots": 1,
    "paged_stash_factor": 1.5,
    "paired_wgrad": ("expert_fc1",),
    "routing": "natural",
    "cuda_graph": ("attn",),
    "fused_grouped_mlp": True,
    "permute_fusion": False,
    "router_fusion": False,
    "fp8_primary_weights": True,
    "fp8_attention": True,
    "bf16_first_layers": 1,
    "bf16_last_layers": 1,
    "bf16_modules": ("attention",),
    "tp_comm_overlap": True,
    "offload_layers": 1,
    "offload_modules": ("expert_fc1",),
    "offload_optimizer_states": True,
    "optimizer_cpu_frac": 0.5,
}
REFUSED = {"packed_lengths", "echo_slots", "paired_wgrad", "offload_layers"}
# What says nothing by itself: it follows from others, or needs another one beside it, tested above. Megatron-LM always
# permutes in the way that spares memory.
FOLLOWS = {
    *("schema_version", "model", "hardware", "num_gpus", "stack", "dp", "edp", "vp", "layout", "sequence_parallel"),
    *(
        "cp_a2a_size",
        "dynamic_cp",
        "document_lengths",
        "max_tokens_per_rank",
        "micro_batch_group_size",
        "flex_backend",
        "delay_wgrad",
        "dispatch_sms",
        "memory_efficient_permutation",
    ),
}


def test_every_setting_of_a_plan_is_thought_of() -> None:
    assert set(OTHERWISE) | FOLLOWS == set(Plan.model_fields)


@pytest.mark.parametrize("key", OTHERWISE)
def test_no_setting_is_left_out_silently(key: str) -> None:
    def flags(**changes: object) -> list[str]:
        fields = {"model": load_model("deepseek-v3-l4"), "num_gpus": 16, "ep": 8, "tp": 2, "cp": 2}
        if key == "paged_stash_factor":
            fields |= {"dispatcher": "flex", "fused_grouped_mlp": True}
        made = job(**(fields | {"precision": "fp8_current"} | changes))
        return export(made, "megatron-lm")["pretrain.sh"].splitlines()[3:]

    if key in REFUSED:
        with pytest.raises(InvalidInputError, match=f"^{key}: got .* Megatron-LM has"):
            flags(**{key: OTHERWISE[key]})
    else:
        assert flags(**{key: OTHERWISE[key]}) != flags()


def test_a_script_forces_balance_only_for_a_benchmark() -> None:
    """Random experts spoil training: a run that asks for them says so."""
    plain = job(ep=8)
    assert "\n  --moe-router-force-load-balancing" not in export(plain, "megatron-lm")["pretrain.sh"]
    forced = ExportJob(plain.plan, RunConfig(force_balance=True), plain.profile)
    assert "\n  --moe-router-force-load-balancing" in export(forced, "megatron-lm")["pretrain.sh"]


def test_whole_iteration_graphs_of_dropless_experts_size_their_buffers_ahead() -> None:
    graph = {"cuda_graph": ("full_iteration",), "ep": 8, "hardware": "b200", "precision": "mxfp8"}
    fused = {"dispatcher": "flex", "flex_backend": "hybridep", "fused_grouped_mlp": True}
    (script,) = export(job(**graph, **fused), "megatron-lm").values()
    for flag in ("--moe-expert-rank-capacity-factor 1.5", "--moe-paged-stash", "--no-check-for-nan-in-loss-and-grad"):
        assert f"  {flag} \\\n" in script
    with pytest.raises(InvalidInputError, match="cuda_graph: full_iteration of dropless experts"):
        export(job(**graph, **(fused | {"fused_grouped_mlp": False})), "megatron-lm")
    stash = export(job(ep=8, hardware="b200", precision="mxfp8", paged_stash_factor=1.4, **fused), "megatron-lm")
    assert "--moe-paged-stash-buffer-size-factor-cuda 1.4" in stash["pretrain.sh"]
    (dense,) = export(job(model=load_model("llama3-8b"), cuda_graph=("full_iteration",)), "megatron-lm").values()
    assert "--moe-" not in dense


def test_gradients_travel_beside_compute_without_sharding_too() -> None:
    (script,) = export(job(sharding="none"), "megatron-lm").values()
    assert "--overlap-grad-reduce" in script
    assert "--overlap-param-gather" not in script


@pytest.mark.parametrize("key", ["grad_dtype", "moment_dtype"])
def test_megatron_keeps_nothing_in_fp64(key: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{key}: got fp64, Megatron-LM has fp32, bf16"):
        export(job(**{key: "fp64"}), "megatron-lm")


def test_rope_that_megatron_has_fixed_is_refused_otherwise() -> None:
    for scaling, name, wrong in (
        (Llama3Scaling(factor=8, original_max_positions=8192), "llama3-8b", {"original_max_positions": 4096}),
        (YarnScaling(factor=40, original_max_positions=4096), "deepseek-v3-l4", {"beta_fast": 1.0}),
    ):
        model = load_model(name).model_copy(update={"rope_scaling": scaling})
        export(job(model=model), "megatron-lm")
        changed = model.model_copy(update={"rope_scaling": scaling.model_copy(update=wrong)})
        with pytest.raises(InvalidInputError, match=rf"^model\.rope_scaling\.{next(iter(wrong))}: got "):
            export(job(model=changed), "megatron-lm")


def test_what_megatron_has_no_word_for_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="flex_backend: got 'torch'"):
        export(job(dispatcher="flex", flex_backend="torch", ep=8), "megatron-lm")
    with pytest.raises(InvalidInputError, match="dynamic_cp: got True"):
        export(job(dynamic_cp=True, document_lengths=(4096,) * 64), "megatron-lm")
    with pytest.raises(InvalidInputError, match="offload_layers: got 2"):
        export(job(offload_layers=2), "megatron-lm")


@pytest.mark.parametrize("target", EXPORTERS)
def test_hosts_must_be_full(target: str) -> None:
    with pytest.raises(InvalidInputError, match="12 GPUs do not fill hosts of 8"):
        export(job(num_gpus=12, global_batch_size=96), target)


def test_a_job_trains_in_the_environment_of_a_run() -> None:
    files = export(job(stack="native", ep=4, pp=2, vp=2, ep_overlap=True), "slurm")
    (exports,) = (line for line in files["job.sbatch"].splitlines() if line.startswith("export "))
    wanted = {"OMP_NUM_THREADS": "1", **RUN_ENVIRONMENT}
    assert exports.split()[1:] == [f"{key}={value}" for key, value in wanted.items()]


@pytest.mark.parametrize("changes", [{"sharding": "full"}, {"ep": 8, "ep_overlap": True}])
def test_megatron_gets_more_connections_where_it_refuses_one(changes: dict[str, Any]) -> None:
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in export(job(), "megatron-lm")["pretrain.sh"]
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=32\n" in export(job(**changes), "megatron-lm")["pretrain.sh"]
