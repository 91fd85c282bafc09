"""Training on one GPU: bf16 beside float32, and a resumed run beside the one that was not stopped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moeplan.executor.launch import launch
from moeplan.mixers import GqaAttention, MlaAttention
from moeplan.model_spec import ModelSpec, Moe, Router
from moeplan.plan import Plan
from moeplan.results import Figures
from tests.executor.run_files import files

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
STEPS = 200
# 20 M parameters, with all that a step of DeepSeek-V3 or Qwen3 has.
_MOE = Moe(num_experts=16, top_k=4, expert_ffn_size=256, shared_ffn_size=256)
_SIZES = {"num_layers": 4, "hidden_size": 256, "vocab_size": 256, "dense_ffn_size": 1024, "num_dense_layers": 1}
GQA = ModelSpec(
    name="small-gqa", moe=_MOE, attention=GqaAttention(num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True), **_SIZES
)
MLA = ModelSpec(
    name="small-mla",
    num_mtp_layers=1,
    moe=_MOE.model_copy(
        update={"router": Router(score_function="sigmoid", expert_bias=True, num_groups=4, top_groups=2)}
    ),
    attention=MlaAttention(
        num_heads=4, q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
    ),
    **_SIZES,
)


def plan_of(model: ModelSpec, precision: str = "bf16", **changes: Any) -> Plan:
    fields = {"model": model, "hardware": "h200", "num_gpus": 1, "seq_len": 512, "global_batch_size": 32, "mbs": 16}
    return Plan.model_validate(fields | {"precision": precision} | changes)


def losses(folder: Path, plan: Plan, **run: Any) -> list[float]:
    """Losses of one run in a process of its own."""
    folder.mkdir(exist_ok=True)
    settings = {"steps": STEPS, "lr": 1e-3, "lr_warmup_steps": 20, "profile_steps": 1}
    paths = files(folder, plan, **(settings | run))
    launch(*paths, 1, lambda _line: None)
    return list(Figures.model_validate(json.loads(paths[2].read_text(encoding="utf-8"))).losses)


def test_bf16_stays_within_a_percent_of_float32(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    exact, rounded = (losses(tmp_path / name, plan_of(GQA, name)) for name in ("fp32", "bf16"))
    # A step's own batch moves its loss by more than that; the last twenty are the same batches in both.
    mean, mean_rounded = (sum(some[-20:]) / 20 for some in (exact, rounded))
    record_property("losses", f"last: {exact[-1]:.4f}, {rounded[-1]:.4f}; last 20: {mean:.4f}, {mean_rounded:.4f}")
    assert exact[-1] < 0.6 * exact[0]
    assert rounded[-1] == pytest.approx(exact[-1], rel=0.01)
    assert mean_rounded == pytest.approx(mean, rel=0.01)


@pytest.mark.parametrize("model", [GQA, MLA], ids=lambda model: str(model.name))
def test_a_resumed_run_repeats_the_whole_one_bit_by_bit(tmp_path: Path, model: ModelSpec) -> None:
    run = {"steps": 20, "deterministic": True}
    whole = losses(tmp_path / "whole", plan_of(model), **run)
    saved = {"save_folder": str(tmp_path / "saved"), "save_every": 10}
    # As a run that is stopped at step 10: its learning rates are those of 20 steps.
    first = losses(tmp_path / "first", plan_of(model), **run, **saved)
    assert first == whole
    (tmp_path / "saved" / "LATEST").write_text("step-00000010\n", encoding="utf-8")
    rest = losses(tmp_path / "rest", plan_of(model), **run, save_folder=saved["save_folder"], resume=True)
    assert rest == whole[10:]
