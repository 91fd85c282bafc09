"""Predictions: complete figures, honest notes, and the neighbourhood of published runs."""

from typing import NamedTuple

import pytest

from moeplan.errors import InvalidInputError
from moeplan.flops import training_flops_per_token
from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.predict import predict
from moeplan.simulator.stack import load_stack
from moeplan.vocabulary import MEMORY_CATEGORIES, OP_FAMILIES

STACK = load_stack("megatron-bridge-26.08")


def test_figures_are_complete_and_consistent(report_plan: Plan) -> None:
    figures = predict(report_plan, load_profile("gb300"), STACK)
    assert tuple(figures.time_s) == OP_FAMILIES
    assert tuple(figures.memory_bytes) == MEMORY_CATEGORIES
    assert sum(time.exposed_s for time in figures.time_s.values()) == pytest.approx(figures.step_s)
    assert figures.tokens_per_s_per_gpu * figures.step_s * 256 == pytest.approx(8192 * 4096)
    flops = training_flops_per_token(report_plan.model, 4096)
    assert figures.model_tflops_per_gpu == pytest.approx(figures.tokens_per_s_per_gpu * flops / 1e12)
    assert figures.peak_memory_bytes == max(map(sum, zip(*figures.memory_bytes.values(), strict=True)))
    assert figures.plan_id == report_plan.plan_id


def test_assumed_entries_are_named_and_widen_the_error_bar(report_plan: Plan) -> None:
    measured = predict(report_plan, load_profile("gb200"), STACK)
    assumed = predict(report_plan.replace(precision="mxfp8"), load_profile("gb300"), STACK)
    assert any("grouped_gemm[mxfp8 te]" in note for note in assumed.notes)
    assert any("dispatch[alltoall scale_up]" in note for note in assumed.notes)
    assert assumed.error_bar_frac > measured.error_bar_frac > 0.03
    assert assumed.provenance["assumed costs"].endswith("of busy time")


class Published(NamedTuple):
    """One published run: what differs between them, and model TFLOP/s a GPU."""

    model: str
    hardware: str
    num_gpus: int
    global_batch_size: int
    mbs: int
    degrees: dict[str, object]
    tflops: float


# Bridge 26.08 performance summary (report section 9.3): MXFP8, HybridEP, full-iteration graphs.
PUBLISHED = [
    Published("deepseek-v3", "gb300", 256, 4096, 1, {"pp": 2, "vp": 8, "ep": 32, "moment_dtype": "bf16"}, 1635),
    Published("deepseek-v3", "gb200", 256, 4096, 1, {"pp": 4, "vp": 4, "ep": 64, "moment_dtype": "bf16"}, 1276),
    Published("qwen3-235b-a22b", "gb300", 256, 8192, 2, {"pp": 4, "vp": 12, "ep": 32}, 1306),
    Published("qwen3-235b-a22b", "gb200", 256, 8192, 1, {"pp": 8, "vp": 3, "ep": 32}, 1077),
    Published("qwen3-30b-a3b", "gb300", 8, 512, 8, {"ep": 8}, 1029),
    Published("qwen3-30b-a3b", "gb200", 8, 512, 4, {"ep": 8}, 923),
]


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run.model}-{run.hardware}")
def test_published_runs_lie_within_a_tenth(run: Published) -> None:
    plan = Plan.model_validate(
        {
            "model": load_model(run.model),
            "hardware": run.hardware,
            "num_gpus": run.num_gpus,
            "stack": STACK.name,
            "seq_len": 4096,
            "global_batch_size": run.global_batch_size,
            "mbs": run.mbs,
            "precision": "mxfp8",
            "dispatcher": "flex",
            "grad_dtype": "bf16",
            "cuda_graph": ["full_iteration"],
            "ep_overlap": True,
            "delay_wgrad": True,
            "fused_grouped_mlp": True,
            **run.degrees,
        }
    )
    figures = predict(plan, load_profile(run.hardware), STACK)
    assert figures.model_tflops_per_gpu == pytest.approx(run.tflops, rel=0.10)


def bare_cpu() -> HardwareProfile:
    """One host of four processes as a new user would write it: peaks and links, no curve."""

    def guess(value: float) -> dict[str, object]:
        return {"value": value, "source": "assumed", "ref": "a test"}

    numbers = {
        "scale_up_domain_gpus": 4,
        "memory_bytes": 16e9,
        "framework_overhead_bytes": 3e8,
        "hbm_bytes_per_s": 2e10,
        "hbm_efficiency_frac": 0.7,
        "gather_efficiency_frac": 0.3,
        "scale_up_bytes_per_s_per_dir_per_gpu": 1e9,
        "network_bytes_per_s_per_dir_per_gpu": 1e8,
        "host_link_bytes_per_s_per_dir_per_gpu": 1e10,
        "launch_s": 5e-6,
        "kernel_floor_s": 1e-6,
        "sustained_frac": 1.0,
    }
    return HardwareProfile.model_validate(
        {
            "name": "bare-cpu",
            "description": "a test",
            "device": "cpu",
            "peak_flops_per_s": {"fp32": guess(1e11)},
            **{name: guess(value) for name, value in numbers.items()},
        }
    )


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_cpu_without_curves_runs_through_the_same_code(precision: str) -> None:
    plan = Plan.model_validate(
        {
            "model": load_model("tiny-moe"),
            "hardware": "bare-cpu",
            "num_gpus": 4,
            "stack": "native",
            "seq_len": 128,
            "global_batch_size": 8,
            "ep": 4,
            "precision": precision,
        }
    )
    figures = predict(plan, bare_cpu(), load_stack("native"))
    assert figures.step_s > training_flops_per_token(plan.model, 128) * plan.tokens_per_step / 4 / 1e11
    assert figures.time_s["host"].exposed_s > 0
    assert figures.time_s["dispatch"].exposed_s > 0
    assert any("no curve" in note or "curve x" in note for note in figures.notes)


def test_a_format_the_machine_lacks_is_a_clear_error() -> None:
    plan = Plan(model=load_model("tiny-moe"), hardware="x", num_gpus=1, seq_len=128, global_batch_size=8)
    with pytest.raises(InvalidInputError, match="no GEMM rate for mxfp8"):
        predict(plan.replace(precision="mxfp8"), bare_cpu(), load_stack("native"))


def test_a_plan_that_would_not_run_says_why(report_plan: Plan) -> None:
    """Rules of the stack, and a failure known of the machine: HybridEP over more than one NVLink domain of B200."""
    fields = {"dispatcher": "flex", "flex_backend": "hybridep", "hardware": "b200"}
    failing = predict(report_plan.replace(**fields), load_profile("b200"), STACK)
    assert [refusal.partition(":")[0] for refusal in failing.refusals] == ["dispatcher"]
    assert "issue 6043" in failing.refusals[0]
    graphed = report_plan.replace(cuda_graph=("attn",), stack="native")
    assert any(
        "cuda_graph" in refusal for refusal in predict(graphed, load_profile("gb300"), load_stack("native")).refusals
    )
    assert not predict(report_plan, load_profile("gb300"), STACK).refusals
