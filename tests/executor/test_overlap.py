"""Exchanges beside compute: the same losses, norms and weights as one process."""

from typing import Any

import pytest
import torch

from tests.executor.cases import build_trainer, tiny_plan
from tests.executor.folding_cases import GQA, RUN, alone, assert_equals_alone, assert_same_run, quick_and_slow
from tests.executor.offload_cases import train_sending_everything
from tests.executor.pools import Pools

# Processes, model, what the plan changes. Those of the first table run with every test run.
QUICK: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ep2, weight gradients delayed": (2, "gqa", {"ep": 2, "ep_overlap": True, "delay_wgrad": True}),
    "shared expert beside exchanges": (2, "gqa", {"ep": 2, "shared_expert_overlap": True}),
    "pp2 vp2 uneven, recompute, delayed": (
        4,
        "gqa",
        {
            "pp": 2,
            "vp": 2,
            "ep": 2,
            "layout": "Et|ttt||mL",
            "recompute": ("layernorm", "moe_act"),
            "ep_overlap": True,
            "delay_wgrad": True,
        },
    ),
}
REST: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ep2, windows": (2, "windowed", {"ep": 2, "ep_overlap": True}),
    "ep2, every recompute": (
        2,
        "gqa",
        {
            "ep": 2,
            "ep_overlap": True,
            "recompute": ("core_attn", "layernorm", "mlp", "moe_act", "shared_experts"),
            "delay_wgrad": True,
        },
    ),
    "ep2, one micro-batch": (2, "gqa", {"ep": 2, "ep_overlap": True, "mbs": 4}),
    "ep2, probabilities after the experts": (
        2,
        "gqa",
        {"ep": 2, "ep_overlap": True, "memory_efficient_permutation": False, "delay_wgrad": True},
    ),
    "tp2 etp2 ep2": (4, "gqa", {"tp": 2, "ep": 2, "etp": 2, "ep_overlap": True, "delay_wgrad": True}),
    "cp2 tp2, ep4": (4, "gqa", {"cp": 2, "tp": 2, "ep": 4, "ep_overlap": True, "delay_wgrad": True}),
    "cp2 heads split, ep4": (4, "gqa", {"cp": 2, "cp_comm": "a2a", "ep": 4, "ep_overlap": True}),
    "ep4, one copy a rank, delayed": (
        4,
        "windowed",
        {"ep": 4, "dispatcher": "flex", "flex_backend": "torch", "ep_overlap": True, "delay_wgrad": True},
    ),
    "tp2 etp2, one copy a rank": (
        4,
        "gqa",
        {"tp": 2, "etp": 2, "ep": 2, "dispatcher": "flex", "flex_backend": "torch", "ep_overlap": True},
    ),
    "ep4 of dp4, states replicated": (4, "gqa", {"ep": 4, "sharding": "none", "ep_overlap": True, "delay_wgrad": True}),
    "ep2 of dp4, fully sharded": (4, "gqa", {"ep": 2, "sharding": "full", "ep_overlap": True}),
    "shared beside exchanges, fully sharded": (4, "gqa", {"ep": 2, "sharding": "full", "shared_expert_overlap": True}),
    "pp2 vp3, ep2": (4, "gqa", {"pp": 2, "vp": 3, "ep": 2, "layout": "E|tt|t|t|m|L", "ep_overlap": True}),
    "pp2 vp2 long groups, ep2": (
        4,
        "windowed",
        {"pp": 2, "vp": 2, "ep": 2, "micro_batch_group_size": 4, "ep_overlap": True, "delay_wgrad": True},
    ),
    "shared beside exchanges, tp2 ep4": (4, "gqa", {"tp": 2, "ep": 4, "shared_expert_overlap": True}),
    "shared beside exchanges, latent, pp2 ep2": (4, "mla", {"pp": 2, "ep": 2, "shared_expert_overlap": True}),
    "shared beside exchanges, experts made again": (
        2,
        "gqa",
        {"ep": 2, "shared_expert_overlap": True, "recompute": ("moe",)},
    ),
    "shared beside exchanges, norms made again": (
        2,
        "mla",
        {"ep": 2, "shared_expert_overlap": True, "recompute": ("layernorm",)},
    ),
    "pp2 vp3, ep4": (
        8,
        "gqa",
        {"pp": 2, "vp": 3, "ep": 4, "layout": "E|tt|t|t|m|L", "ep_overlap": True, "delay_wgrad": True, "mbs": 1},
    ),
    "pp2 vp2 tp2, etp1 ep4": (
        8,
        "gqa",
        {"pp": 2, "vp": 2, "tp": 2, "ep": 4, "layout": "Et|tt|t|mL", "ep_overlap": True, "delay_wgrad": True},
    ),
}


SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "inputs of modules": (
        "gqa",
        {"delay_wgrad": True, "offload_modules": ("attn_norm", "core_attn", "expert_fc1", "moe_act")},
    ),
    "whole layers": ("windowed", {"offload_layers": 2, "recompute": ("layernorm",)}),
    "rows in pages": ("gqa", {"delay_wgrad": True, "paged_stash_factor": 2.0}),
}


@pytest.mark.parametrize("case", quick_and_slow(QUICK, REST))
def test_overlapped_equals_alone(pools: Pools, case: tuple[int, str, dict[str, Any]]) -> None:
    assert_equals_alone(pools, case)


@pytest.mark.slow
@pytest.mark.parametrize("what", SENT)
def test_overlap_while_tensors_wait_elsewhere_equals_alone(pools: Pools, what: str) -> None:
    model, changes = SENT[what]
    plan = {"ep": 2, "ep_overlap": True, **changes}
    assert_same_run(alone(model), pools[2].run(train_sending_everything, model, 2, plan))


def bf16_losses(rank: int, changes: dict[str, Any]) -> list[float]:
    plan = tiny_plan(GQA, 2, ep=2, precision="bf16", **changes)
    trainer = build_trainer(rank, plan, RUN)
    return [trainer.step(number).loss for number in range(4)]


def test_half_precision_runs_the_same_beside_and_apart(pools: Pools) -> None:
    apart = pools[2].run(bf16_losses, {})
    for changes in ({"ep_overlap": True, "delay_wgrad": True}, {"shared_expert_overlap": True}):
        for losses, expected in zip(pools[2].run(bf16_losses, changes), apart, strict=True):
            torch.testing.assert_close(losses, expected, rtol=0, atol=5e-3)  # sums in another order
