"""Foldings of one tiny model that have every part: dense first layer, shared expert, MTP, both kinds of attention."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from moeplan.executor.train import Trainer
from moeplan.mixers import GatedDeltaNet, GqaAttention, Mamba2, MlaAttention
from moeplan.model_spec import ModelSpec, Moe, Router
from moeplan.run_config import RunConfig
from tests.executor.cases import Part, build_trainer, tiny_plan, weights_of
from tests.executor.pools import Pools

STEPS = 5
TOLERANCE = 1e-9
# Clipping is active: the norm of a fresh model's gradient is near 3.
RUN = RunConfig(steps=STEPS, lr=3e-3, lr_warmup_steps=2, clip_grad_norm=0.5)

_MOE = Moe(
    num_experts=8,
    top_k=2,
    expert_ffn_size=16,
    shared_ffn_size=16,
    router=Router(aux_loss="seq_aux_loss", aux_loss_coeff=0.05, z_loss_coeff=0.01, expert_bias=True),
)
GQA = ModelSpec(
    name="folded-gqa",
    num_layers=4,
    hidden_size=32,
    vocab_size=256,
    dense_ffn_size=32,
    num_dense_layers=1,
    num_mtp_layers=1,
    attention=GqaAttention(num_heads=4, num_kv_heads=4, head_dim=8, qk_norm=True, qkv_bias=True),
    moe=_MOE,
)
MLA = GQA.model_copy(
    update={
        "name": "folded-mla",
        "tied_embeddings": True,
        "num_mtp_layers": 2,
        "attention": MlaAttention(
            num_heads=4, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
        ),
        "moe": _MOE.model_copy(
            update={
                "router": Router(
                    score_function="sigmoid",
                    num_groups=4,
                    top_groups=2,
                    scaling_factor=2.5,
                    aux_loss="aux_loss",
                    aux_loss_coeff=0.05,
                    expert_bias=True,
                )
            }
        ),
    }
)
# Two sliding windows and no MTP: the final norm then belongs to the loss.
WINDOWED = GQA.model_copy(
    update={
        "name": "folded-windowed",
        "num_mtp_layers": 0,
        "attention": GqaAttention(num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=6, sliding_period=2),
    }
)
# Qwen3-Next: two layers of gated delta net to one of gated attention.
DELTA_NET = GQA.model_copy(
    update={
        "name": "folded-delta-net",
        "attention": GqaAttention(
            num_heads=4, num_kv_heads=4, head_dim=8, qk_norm=True, rotary_dim=4, output_gate=True
        ),
        "linear_mixer": GatedDeltaNet(num_k_heads=4, num_v_heads=8, k_head_dim=8, v_head_dim=4, chunk_size=8),
        "attention_period": 3,
        "moe": _MOE.model_copy(update={"shared_gate": True}),
    }
)


def _dropping(*, pad: bool) -> ModelSpec:
    """Experts take three quarters of their share, those tokens that come first.

    By position, because equal tokens at the start of a sequence have equal probabilities but for rounding.
    """
    router = _MOE.router.model_copy(update={"capacity_factor": 0.75, "pad_to_capacity": pad, "drop_policy": "position"})
    return GQA.model_copy(update={"name": "folded-dropping", "moe": _MOE.model_copy(update={"router": router})})


# Balanced against the load of the step so far.
STEP_BALANCED = GQA.model_copy(
    update={
        "name": "folded-step-balanced",
        "moe": _MOE.model_copy(
            update={"router": _MOE.router.model_copy(update={"aux_loss": "global_aux_loss", "z_loss_coeff": 0.0})}
        ),
    }
)
ODD = GQA.model_copy(update={"name": "folded-odd", "vocab_size": 259})  # of a prime number of tokens
# Layers of one block: Mamba-2 in two groups, attention without rotation, experts in a latent; depths of whole layers.
NEMOTRON = ModelSpec(
    name="folded-nemotron",
    num_layers=6,
    layer_pattern="MEM*-E",
    hidden_size=32,
    vocab_size=256,
    dense_ffn_size=32,
    num_mtp_layers=1,
    activation="squared_relu",
    attention=GqaAttention(num_heads=4, num_kv_heads=2, head_dim=8, rotary=False),
    linear_mixer=Mamba2(num_heads=8, head_dim=4, state_size=6, num_groups=2, chunk_size=5),
    moe=Moe(
        num_experts=8,
        top_k=2,
        expert_ffn_size=16,
        shared_ffn_size=16,
        latent_size=12,
        router=Router(
            score_function="sigmoid",
            scaling_factor=2.5,
            aux_loss="seq_aux_loss",
            aux_loss_coeff=0.05,
            expert_bias=True,
        ),
    ),
)
MODELS = {
    "gqa": GQA,
    "odd": ODD,
    "mla": MLA,
    "windowed": WINDOWED,
    "delta-net": DELTA_NET,
    "dropping": _dropping(pad=False),
    "padded": _dropping(pad=True),
    "step-balanced": STEP_BALANCED,
    "nemotron": NEMOTRON,
    "shared-depths": NEMOTRON.model_copy(update={"num_mtp_layers": 2, "mtp_shared": True}),
}


@dataclass(frozen=True)
class Ran:
    """What some steps leave on one rank; ``biases`` by the name of their router."""

    losses: list[float]
    grad_norms: list[float]
    parts: list[Part]
    biases: dict[str, Tensor]


def ran(trainer: Trainer, losses: list[float], grad_norms: list[float]) -> Ran:
    """The state after some steps."""
    biases = {router.name: router.bias_E.clone() for router in trainer.model.routers() if router.bias_E is not None}
    return Ran(losses, grad_norms, weights_of(trainer), biases)


def ran_steps(trainer: Trainer, numbers: Iterable[int]) -> Ran:
    """The state after the steps of these numbers, with their losses and norms."""
    results = [trainer.step(number) for number in numbers]
    return ran(trainer, [result.loss for result in results], [result.grad_norm for result in results])


def train_folded(rank: int, model: str, num_gpus: int, changes: dict[str, Any]) -> Ran:
    """All steps of one plan; every rank of it calls this together, and others return at once."""
    return ran_steps(build_trainer(rank, tiny_plan(MODELS[model], num_gpus, **changes), RUN), range(STEPS))


def train_on_hosts(rank: int, model: str, num_gpus: int, changes: dict[str, Any], ranks_per_host: int) -> Ran:
    """As :func:`train_folded`, where the launcher says how many ranks share a host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(ranks_per_host))
        return train_folded(rank, model, num_gpus, changes)


@lru_cache
def alone(model: str, mbs: int = 1, routing: str = "balanced", packed_lengths: tuple[int, ...] = ()) -> Ran:
    """The same steps on one process without any process group."""
    return train_folded(0, model, 1, {"mbs": mbs, "routing": routing, "packed_lengths": packed_lengths})


def assert_equals_alone(pools: Pools, case: tuple[int, str, dict[str, Any]]) -> None:
    """Train a case, (number of processes, model, changes of the plan), and the same on one process."""
    num_gpus, model, changes = case
    expected = alone(model, changes.get("mbs", 1), packed_lengths=changes.get("packed_lengths", ()))
    assert_same_run(expected, pools[num_gpus].run(train_folded, model, num_gpus, changes))


def quick_and_slow(quick: Mapping[str, Any], slow: Mapping[str, Any]) -> list[Any]:
    """Cases of a test by their names, of which those of the second table run with the slow ones alone."""
    return [
        *(pytest.param(case, id=name) for name, case in quick.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in slow.items()),
    ]


def assert_same_run(expected: Ran, ranks: list[Ran]) -> None:
    """Loss, global norm, router biases and every weight agree, and no part of a weight is missing."""
    for outcome in ranks:
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(outcome.grad_norms, expected.grad_norms, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same_state(expected, ranks)


def assert_same_state(expected: Ran, ranks: list[Ran]) -> None:
    """Router biases and every weight agree, and no part of a weight is missing."""
    whole = {part.name: part.values for part in expected.parts}
    seen = {name: torch.zeros(values.shape, dtype=torch.bool) for name, values in whole.items()}
    for outcome in ranks:
        for name, bias_E in outcome.biases.items():
            torch.testing.assert_close(bias_E, expected.biases[name], rtol=0, atol=0)
        for part in outcome.parts:
            wanted = whole[part.name][part.source]
            torch.testing.assert_close(part.values, wanted, rtol=0, atol=TOLERANCE, msg=f"{part.name} differs")
            seen[part.name][part.source] = True
    assert {name for outcome in ranks for name in outcome.biases} == set(expected.biases)
    assert all(bool(mask.all()) for mask in seen.values()), "some weight is on no rank"
