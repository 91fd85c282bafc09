"""What waits on a GPU for backward, under offload, recompute and pages: fewer bytes, the same gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moeplan.executor.data import open_tokens
from moeplan.executor.mesh import build_mesh
from moeplan.executor.micro_batch import MicroBatch
from moeplan.executor.model import Transformer
from moeplan.executor.train import Trainer
from moeplan.folding import Folding
from moeplan.mixers import GqaAttention
from moeplan.model_spec import MOE_LAYER, ModelSpec, Moe
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from moeplan.simulator.activations import kept_bytes
from moeplan.simulator.layer_state import waiting_bytes
from moeplan.simulator.placement import rank_chunks
from moeplan.simulator.stack import load_stack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MODEL = ModelSpec(
    name="gpu-memory",
    num_layers=6,
    hidden_size=1024,
    vocab_size=1024,
    attention=GqaAttention(num_heads=8, num_kv_heads=4, head_dim=128),
    moe=Moe(num_experts=16, top_k=4, expert_ffn_size=1024),
)
NATIVE = load_stack("native")


def run(**changes: Any) -> tuple[Plan, list[Tensor], int]:
    """The plan, gradients of all parameters, and bytes that wait between forward and backward of one micro-batch."""
    fields = {"model": MODEL, "hardware": "h200", "num_gpus": 1, "seq_len": 2048, "global_batch_size": 4, "mbs": 4}
    plan = Plan.model_validate(fields | changes)
    device = torch.device("cuda")
    torch.manual_seed(3)
    model = Transformer(plan, build_mesh(Folding(1), 0), seed=1, device=device)
    ids = torch.randint(0, MODEL.vocab_size, (plan.mbs * plan.seq_len,), device=device)
    for _ in range(2):  # the first one compiles kernels
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model(ids, ids.roll(-1))
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
    return plan, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], held


@pytest.mark.parametrize(
    "changes",
    [
        {"offload_layers": 4},
        {"offload_modules": ("attn_norm", "attn_proj", "core_attn", "expert_fc1", "mlp_norm", "moe_act")},
        {"offload_modules": ("fused_group_mlp",), "recompute": ("layernorm", "moe_act")},
        {"recompute": ("full",)},
        {"paged_stash_factor": 1.1},
    ],
)
def test_gradients_are_those_of_keeping_everything(changes: dict[str, Any]) -> None:
    _, plain, most = run()
    _, found, held = run(**changes)
    assert held < most * (1.15 if "paged_stash_factor" in changes else 0.8)
    for mine, other in zip(found, plain, strict=True):
        assert float((mine - other).norm()) <= 1e-2 * float(other.norm())  # atomics add in another order


@pytest.mark.parametrize("changes", [{}, {"recompute": ("layernorm", "moe_act")}, {"offload_modules": ("expert_fc1",)}])
def test_bytes_are_those_of_the_native_stack(changes: dict[str, Any]) -> None:
    plan, _, held = run(**changes)
    kept = kept_bytes(MODEL, MOE_LAYER, plan.point, NATIVE)
    loss = kept_bytes(MODEL, "loss", plan.point, NATIVE).kept_bytes
    logits = 2 * plan.tokens_per_rank * MODEL.vocab_size
    resident = NATIVE.offload_resident_layers * kept.offloaded_bytes
    expected = MODEL.num_layers * kept.kept_bytes + resident + loss + logits
    assert held == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_blockwise"])
def test_what_waits_for_the_next_micro_batch_is_what_is_predicted(precision: str) -> None:
    fields = {"model": MODEL, "hardware": "h200", "num_gpus": 1, "seq_len": 2048, "global_batch_size": 16, "mbs": 4}
    plan = Plan.model_validate(fields | {"precision": precision, "paired_wgrad": ("expert_fc1", "expert_fc2")})
    settings = RunConfig()
    trainer = Trainer(plan, settings, build_mesh(Folding(1), 0), open_tokens(plan, settings), torch.device("cuda", 0))
    held: list[int] = []

    def micro_batch(index: int) -> MicroBatch:
        held.append(torch.cuda.memory_allocated())
        return trainer._micro_batch(0, index)

    trainer.pipeline.run(micro_batch)
    expected = waiting_bytes(MODEL, plan.point, NATIVE, rank_chunks(MODEL, plan.layout, 1)[0])
    assert held[1] - held[2] == pytest.approx(expected, rel=0.01)
    assert held[3] - held[2] == pytest.approx(expected, rel=0.01)
