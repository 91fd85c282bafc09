"""Tiny models and plans of the executor's tests, and what one rank does with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeplan.executor.data import open_tokens
from moeplan.executor.fsdp import ShardedBuffer
from moeplan.executor.mesh import plan_mesh
from moeplan.executor.optimizer import ChainedOptimizer
from moeplan.executor.primary_weights import PrimaryBuffer
from moeplan.executor.train import Trainer
from moeplan.mixers import GqaAttention, MlaAttention
from moeplan.model_spec import ModelSpec, Moe, Router
from moeplan.plan import Plan
from moeplan.run_config import RunConfig

GQA_MODEL = ModelSpec(
    name="tiny-gqa",
    num_layers=2,
    hidden_size=32,
    vocab_size=256,
    dense_ffn_size=32,
    num_dense_layers=1,
    attention=GqaAttention(
        num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True, qkv_bias=True, out_bias=True, sliding_window=6
    ),
    moe=Moe(
        num_experts=8,
        top_k=2,
        expert_ffn_size=16,
        shared_ffn_size=16,
        shared_gate=True,
        router=Router(aux_loss="aux_loss", aux_loss_coeff=0.05, z_loss_coeff=0.01),
    ),
)
MLA_MODEL = ModelSpec(
    name="tiny-mla",
    num_layers=2,
    hidden_size=32,
    vocab_size=256,
    dense_ffn_size=32,
    num_dense_layers=1,
    tied_embeddings=True,
    activation="geglu",
    attention=MlaAttention(
        num_heads=4, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    ),
    moe=Moe(
        num_experts=8,
        top_k=2,
        expert_ffn_size=16,
        router=Router(
            score_function="sigmoid",
            num_groups=4,
            top_groups=2,
            scaling_factor=2.5,
            aux_loss="seq_aux_loss",
            aux_loss_coeff=0.05,
            expert_bias=True,
        ),
    ),
)

DENSE_MODEL = ModelSpec(
    name="tiny-dense",
    num_layers=2,
    hidden_size=32,
    vocab_size=256,
    dense_ffn_size=48,
    activation="squared_relu",
    attention=GqaAttention(num_heads=4, num_kv_heads=4, head_dim=8),
)


def tiny_plan(model: ModelSpec, num_gpus: int, **changes: Any) -> Plan:
    """A float64 plan of eight sequences of 16 tokens a step."""
    fields = {"seq_len": 16, "global_batch_size": 8, "precision": "fp64"}
    return Plan(model=model, hardware="cpu-host", num_gpus=num_gpus, **(fields | changes))


@dataclass(frozen=True)
class Part:
    """A rank's part of a whole weight: where it lies there, and its values."""

    name: str
    source: tuple[slice, ...]
    values: Tensor


@dataclass(frozen=True)
class Outcome:
    """What some steps leave on one rank."""

    losses: list[float]
    grad_norms: list[float]
    parts: list[Part]
    biases: list[Tensor]


def run_steps(rank: int, plan: Plan, run: RunConfig, num_steps: int) -> Outcome:
    """Train ``num_steps`` steps; all ranks of the plan call it together."""
    trainer = build_trainer(rank, plan, run)
    results = [trainer.step(number) for number in range(num_steps)]
    return Outcome(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        weights_of(trainer),
        [router.bias_E.clone() for router in trainer.model.routers() if router.bias_E is not None],
    )


def build_trainer(rank: int, plan: Plan, run: RunConfig) -> Trainer:
    """A trainer on the CPU."""
    mesh = plan_mesh(plan, rank)
    return Trainer(plan, run, mesh, open_tokens(plan, run), torch.device("cpu"))


@contextmanager
def whole_weights(optimizer: ChainedOptimizer) -> Iterator[None]:
    """Every parameter holds its weights inside, whatever the sharding. Collective over the copies."""
    optimizer.finish_gathers()
    sharded = [one.buffer for one in optimizer.classes if isinstance(one.buffer, ShardedBuffer | PrimaryBuffer)]
    for buffer in sharded:
        buffer.gather()
    yield
    for buffer in sharded:
        buffer.release()


def weights_of(trainer: Trainer) -> list[Part]:
    """This rank's weights as parts of whole ones. Collective."""
    with whole_weights(trainer.optimizer):
        return [
            Part(piece.name, piece.source, entry.parameter.detach()[piece.target].clone().view_as(_like(piece.source)))
            for entry in trainer.model.table.entries
            for piece in entry.pieces
        ]


def _like(source: tuple[slice, ...]) -> Tensor:
    return torch.empty([part.stop - part.start for part in source])
