"""Pipelines, context parallelism and checkpoints on two GPUs against one."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moeplan.executor.data import open_tokens
from moeplan.executor.mesh import plan_mesh
from moeplan.executor.train import Trainer
from moeplan.mixers import GqaAttention, MlaAttention
from moeplan.model_spec import Moe
from moeplan.run_config import RunConfig
from tests.executor.cases import tiny_plan
from tests.executor.folding_cases import GQA, MLA, RUN
from tests.executor.gloo_pool import GlooPool, gloo_pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
STEPS = 4
# Widths that tensor cores and flash attention take.
_WIDTHS = {"hidden_size": 256, "dense_ffn_size": 512}
_MOE = Moe(num_experts=8, top_k=2, expert_ffn_size=256, shared_ffn_size=256)
MODELS = {
    "gqa": GQA.model_copy(
        update={**_WIDTHS, "moe": _MOE, "attention": GqaAttention(num_heads=4, num_kv_heads=2, head_dim=64)}
    ),
    "mla": MLA.model_copy(
        update={
            **_WIDTHS,
            "moe": _MOE,
            "attention": MlaAttention(
                num_heads=4, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32
            ),
        }
    ),
}
FOLDINGS: dict[str, dict[str, Any]] = {
    "ep2": {"ep": 2},
    "tp2 etp2": {"tp": 2, "etp": 2},
    "pp2": {"pp": 2},
    "pp2 vp2": {"pp": 2, "vp": 2},
    "cp2 ring": {"cp": 2, "ep": 2},
    "cp2 gathered": {"cp": 2, "cp_comm": "all_gather"},
    "cp2 heads split": {"cp": 2, "cp_comm": "a2a"},
    "full sharding": {"sharding": "full"},
    "full sharding, ep2, recompute": {"sharding": "full", "ep": 2, "recompute": ("full",)},
    "full sharding, states away": {"sharding": "full", "offload_optimizer_states": True},
    "states away": {"ep": 2, "offload_optimizer_states": True},
    "part of the step on the host": {"ep": 2, "optimizer_cpu_frac": 0.5},
    "nothing beside compute": {"ep": 2, "overlap_grad_reduce": False, "overlap_param_gather": False},
    "ep2 gathered": {"ep": 2, "dispatcher": "allgather"},
    "ep2 deduplicated": {"ep": 2, "dispatcher": "flex", "flex_backend": "torch"},
    "tp2 etp2 deduplicated": {"tp": 2, "etp": 2, "dispatcher": "flex", "flex_backend": "torch"},
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(2, tmp_path_factory.mktemp("nccl"), "nccl") as pool:
        yield pool


def trainer_on_gpu(rank: int, model: str, num_gpus: int, changes: dict[str, Any], run: RunConfig) -> Trainer:
    plan = tiny_plan(MODELS[model], num_gpus, **({"precision": "bf16", "seq_len": 128} | changes))
    return Trainer(plan, run, plan_mesh(plan, rank), open_tokens(plan, run), torch.device("cuda", rank))


def losses_on_gpu(rank: int, model: str, num_gpus: int, changes: dict[str, Any]) -> list[float]:
    trainer = trainer_on_gpu(rank, model, num_gpus, changes, RUN)
    return [trainer.step(number).loss for number in range(STEPS)]


@lru_cache
def alone(model: str) -> list[float]:
    return losses_on_gpu(0, model, 1, {})


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("folding", FOLDINGS)
def test_two_gpus_stay_near_one(pool: GlooPool, folding: str, model: str) -> None:
    for losses in pool.run(losses_on_gpu, model, 2, FOLDINGS[folding]):
        # As on a CPU in bf16: 8 bits of mantissa, and rounding may send a token to another expert.
        torch.testing.assert_close(losses, alone(model), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    "dispatcher", [{}, {"dispatcher": "allgather"}, {"dispatcher": "flex", "flex_backend": "torch"}]
)
def test_two_gpus_drop_as_one_does(pool: GlooPool, dispatcher: dict[str, Any]) -> None:
    expected = losses_on_gpu(0, "gqa", 1, {"routing": "drop"})
    for losses in pool.run(losses_on_gpu, "gqa", 2, {"ep": 2, "routing": "drop", **dispatcher}):
        torch.testing.assert_close(losses, expected, rtol=0, atol=0.03)


@pytest.mark.parametrize(
    "changes", [{"ep_overlap": True}, {"ep_overlap": True, "delay_wgrad": True}, {"shared_expert_overlap": True}]
)
def test_exchanges_beside_compute_change_nothing(pool: GlooPool, changes: dict[str, Any]) -> None:
    plain = pool.run(losses_on_gpu, "gqa", 2, {"ep": 2})
    for losses, expected in zip(pool.run(losses_on_gpu, "gqa", 2, {"ep": 2, **changes}), plain, strict=True):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-3)  # sums in another order


def save_and_resume(rank: int, folder: str) -> tuple[list[float], list[float], list[float]]:
    """Losses after the save, after loading at the same folding, and at another one."""
    run = RUN.model_copy(update={"save_folder": folder, "save_async": True})
    trainer = trainer_on_gpu(rank, "mla", 2, {"pp": 2}, run)
    assert trainer.checkpoints is not None
    for number in range(2):
        trainer.step(number)
    trainer.checkpoints.save(2)
    found = [[trainer.step(number).loss for number in range(2, STEPS)]]
    trainer.checkpoints.wait()
    for changes in ({"pp": 2}, {"cp": 2, "ep": 2}):
        again = trainer_on_gpu(rank, "mla", 2, changes, run)
        assert again.checkpoints is not None
        first = again.checkpoints.load()
        found.append([again.step(number).loss for number in range(first, STEPS)])
    return found[0], found[1], found[2]


def test_a_checkpoint_goes_on_at_either_folding(pool: GlooPool, tmp_path: Path) -> None:
    for rest, same, other in pool.run(save_and_resume, str(tmp_path)):
        torch.testing.assert_close(same, rest, rtol=0, atol=1e-3)
        torch.testing.assert_close(other, rest, rtol=0, atol=0.03)
