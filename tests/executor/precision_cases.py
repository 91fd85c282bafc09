"""Models and plans of the low-precision tests: every matrix wide enough to be quantized."""

from typing import Any

from moeplan.mixers import GqaAttention, MlaAttention
from moeplan.model_spec import ModelSpec, Moe, Router
from moeplan.plan import Plan

MOE = Moe(num_experts=4, top_k=2, expert_ffn_size=128, shared_ffn_size=128, router=Router(expert_bias=True))
GQA = ModelSpec(
    name="low-gqa",
    num_layers=2,
    num_dense_layers=1,
    dense_ffn_size=256,
    hidden_size=128,
    vocab_size=256,
    attention=GqaAttention(num_heads=8, num_kv_heads=4, head_dim=32),
    moe=MOE,
)
MLA = GQA.model_copy(
    update={
        "name": "low-mla",
        "num_mtp_layers": 1,
        "attention": MlaAttention(
            num_heads=4, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32
        ),
    }
)


def low_plan(model: ModelSpec, num_gpus: int, **changes: Any) -> Plan:
    """Four sequences of 64 tokens a step, blockwise FP8 unless ``changes`` says otherwise."""
    fields = {"seq_len": 32, "global_batch_size": 4, "precision": "fp8_blockwise"}
    return Plan(model=model, hardware="cpu-host", num_gpus=num_gpus, **(fields | changes))
