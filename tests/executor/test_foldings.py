"""One table of foldings on 2 to 16 processes against one process, in float64: each axis alone, and mixed.

After five steps the losses, the global norms, every weight and every router bias are the same to 1e-9.
"""

from typing import Any

import pytest

from tests.executor.folding_cases import alone, assert_equals_alone, assert_same_run, quick_and_slow, train_on_hosts
from tests.executor.pools import Pools

PAIRS = {"cp_comm": "a2a+p2p", "cp_a2a_size": 2}
DOCUMENTS = {"packed_lengths": (4, 8, 4)}
# Processes, model, what the plan changes. Those of the first table run with every test run.
QUICK: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dp2, experts folded over both": (2, "gqa", {"ep": 2}),
    "cp2 alone": (2, "mla", {"cp": 2}),
    "pp2 alone": (2, "mla", {"pp": 2}),
    "Mamba over cp2, documents": (2, "nemotron", {"cp": 2, "mbs": 2, **DOCUMENTS}),
    "Mamba over tp2 pp2, uneven": (4, "nemotron", {"tp": 2, "pp": 2, "ep": 2, "layout": "Etttt|ttmL"}),
    "tp4, etp1 ep4": (4, "gqa", {"tp": 4, "ep": 4}),
    "tp2 pp2, etp2": (4, "mla", {"tp": 2, "pp": 2, "etp": 2}),
    "cp2 pp2 vp2, uneven": (4, "gqa", {"cp": 2, "pp": 2, "vp": 2, "ep": 2, "layout": "Et|ttt||mL"}),
    "full sharding, ep2": (4, "gqa", {"sharding": "full", "ep": 2}),
    "cp4, heads split in pairs and a ring of two": (4, "gqa", {"cp": 4, **PAIRS, "ep": 4}),
    "cp2 tp2, documents": (4, "mla", {"cp": 2, "tp": 2, "ep": 2, **DOCUMENTS}),
    "tp4 dp2, etp1 ep8": (8, "gqa", {"tp": 4, "ep": 8}),
    "tp2 cp2 pp2, ep larger than dp": (8, "mla", {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
}
REST: dict[str, tuple[int, str, dict[str, Any]]] = {
    "Mamba over tp2, documents": (2, "nemotron", {"tp": 2, **DOCUMENTS}),
    "Mamba over cp2, heads of attention split beside": (2, "nemotron", {"cp": 2, "cp_comm": "a2a", "etp": 2}),
    "Mamba over pp2 vp2": (2, "nemotron", {"pp": 2, "vp": 2, "layout": "Et|tt|tt|tmL"}),
    "Mamba, full sharding, ep2": (2, "nemotron", {"sharding": "full", "ep": 2}),
    "Mamba, full sharding, full recompute": (2, "nemotron", {"sharding": "full", "ep": 2, "recompute": ("full",)}),
    "Mamba beside exchanges": (2, "nemotron", {"ep": 2, "ep_overlap": True, "delay_wgrad": True}),
    "a latent beside the shared expert": (2, "nemotron", {"ep": 2, "shared_expert_overlap": True}),
    "Mamba on the host, flex": (
        2,
        "nemotron",
        {"ep": 2, "offload_layers": 4, "dispatcher": "flex", "flex_backend": "torch"},
    ),
    "a latent, clones and pages": (2, "nemotron", {"ep": 2, "echo_slots": 1, "paged_stash_factor": 1.5}),
    "one block for all depths, ep2": (2, "shared-depths", {"ep": 2}),
    "one block for all depths, full sharding": (2, "shared-depths", {"sharding": "full", "recompute": ("full",)}),
    "one block for all depths, pp2": (2, "shared-depths", {"pp": 2, "layout": "Ettttt|tmmL"}),
    "one block for all depths, tp2 cp2": (4, "shared-depths", {"tp": 2, "cp": 2, "ep": 2, "offload_layers": 5}),
    "Mamba over cp4, ranks that share a group": (4, "nemotron", {"cp": 4, "ep": 2, "recompute": ("layernorm",)}),
    "Mamba over tp2 cp2 pp2, ep2": (8, "nemotron", {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "layout": "Ettt|tttmL"}),
    "full sharding alone": (2, "mla", {"sharding": "full"}),
    "full sharding, nothing beside compute": (
        2,
        "gqa",
        {"sharding": "full", "overlap_grad_reduce": False, "overlap_param_gather": False},
    ),
    "full sharding over cp2 dp2": (4, "gqa", {"sharding": "full", "cp": 2, "ep": 2}),
    "full sharding, full recompute": (2, "gqa", {"sharding": "full", "ep": 2, "recompute": ("full",)}),
    "full sharding, some recompute": (
        4,
        "mla",
        {"sharding": "full", "recompute": ("layernorm", "mla_up_proj", "moe_act", "mlp")},
    ),
    "full sharding, pp2": (4, "mla", {"sharding": "full", "pp": 2}),
    "full sharding, pp2 vp2, uneven": (
        4,
        "gqa",
        {"sharding": "full", "pp": 2, "vp": 2, "ep": 2, "layout": "Et|ttt||mL"},
    ),
    "full sharding, tp2 ep2": (4, "gqa", {"sharding": "full", "tp": 2, "ep": 2}),
    "full sharding, tp2 etp2": (4, "mla", {"sharding": "full", "tp": 2, "etp": 2}),
    "full sharding under overlap of the exchange": (4, "gqa", {"sharding": "full", "ep": 2, "ep_overlap": True}),
    "full sharding, weight gradients delayed": (
        4,
        "gqa",
        {"sharding": "full", "ep": 2, "ep_overlap": True, "delay_wgrad": True},
    ),
    "tp4, a vocabulary that does not divide": (4, "odd", {"tp": 4, "ep": 2}),
    "hybrid sharding": (4, "mla", {"sharding": "full", "dp_replicate": 2}),
    "hybrid sharding, ep2": (4, "gqa", {"sharding": "full", "dp_replicate": 2, "ep": 2}),
    "hybrid sharding of states alone": (4, "gqa", {"dp_replicate": 2, "ep": 2}),
    "hybrid sharding, tp2 ep2": (8, "gqa", {"sharding": "full", "dp_replicate": 2, "tp": 2, "ep": 2}),
    "nothing beside compute": (2, "gqa", {"ep": 2, "overlap_grad_reduce": False, "overlap_param_gather": False}),
    "states on the host": (2, "gqa", {"offload_optimizer_states": True}),
    "full sharding, part of the step on the host": (4, "mla", {"sharding": "full", "ep": 2, "optimizer_cpu_frac": 0.4}),
    "full sharding, tp2 cp2 pp2 dp2, ep4": (
        16,
        "gqa",
        {"sharding": "full", "tp": 2, "cp": 2, "pp": 2, "ep": 4},
    ),
    "dp2 alone": (2, "gqa", {}),
    "dp2 alone, states replicated": (2, "mla", {"sharding": "none"}),
    "tp2 alone": (2, "mla", {"tp": 2}),
    "etp2 alone": (2, "gqa", {"etp": 2}),
    "ep2 alone": (2, "windowed", {"ep": 2}),
    "cp2 alone, windows": (2, "windowed", {"cp": 2}),
    "pp2 vp2, uneven": (2, "gqa", {"pp": 2, "vp": 2, "layout": "Ettt||t|mL"}),
    "pp4 alone": (4, "windowed", {"pp": 4, "layout": "Et|tt|t|L"}),
    "dp4, ep4": (4, "mla", {"ep": 4}),
    "tp2 dp2, etp4": (4, "gqa", {"tp": 2, "etp": 4}),
    "tp2 dp2, etp2 ep2": (4, "mla", {"tp": 2, "etp": 2, "ep": 2}),
    "cp4, ep4, two sequences": (4, "mla", {"cp": 4, "ep": 4, "mbs": 2}),
    "cp4 alone, gathered": (4, "mla", {"cp": 4, "cp_comm": "all_gather"}),
    "cp2 tp2, heads split": (4, "gqa", {"cp": 2, "tp": 2, "cp_comm": "a2a", "ep": 2}),
    "cp4, pairs and a ring, latent, recomputed": (4, "mla", {"cp": 4, **PAIRS, "recompute": ("core_attn",)}),
    "cp4, pairs that gather for windows": (4, "windowed", {"cp": 4, **PAIRS, "etp": 2}),
    "cp4, pairs and a ring, documents": (4, "gqa", {"cp": 4, **PAIRS, "ep": 2, "packed_lengths": (8, 8)}),
    "cp4 tp2 dp2, pairs and a ring": (16, "gqa", {"cp": 4, "tp": 2, **PAIRS, "ep": 4}),
    "documents over tp2": (2, "mla", {"tp": 2, **DOCUMENTS}),
    "documents over ep2": (2, "windowed", {"ep": 2, **DOCUMENTS}),
    "documents over pp2": (2, "gqa", {"pp": 2, "packed_lengths": (3, 1, 12)}),
    "documents over cp2, a ring": (2, "gqa", {"cp": 2, **DOCUMENTS}),
    "documents over cp2, a ring, two sequences": (2, "mla", {"cp": 2, "mbs": 2, **DOCUMENTS}),
    "documents over cp2, gathered": (2, "mla", {"cp": 2, "cp_comm": "all_gather", **DOCUMENTS}),
    "documents over cp2, gathered for windows": (2, "windowed", {"cp": 2, "mbs": 2, **DOCUMENTS}),
    "documents over cp2, heads split": (2, "gqa", {"cp": 2, "cp_comm": "a2a", "mbs": 2, **DOCUMENTS}),
    "documents over cp2, heads split, windows": (2, "windowed", {"cp": 2, "cp_comm": "a2a", **DOCUMENTS}),
    "pp2 dp2, states replicated": (4, "mla", {"pp": 2, "sharding": "none", "ep": 2}),
    "cp2 tp2, full recompute": (4, "gqa", {"cp": 2, "tp": 2, "ep": 2, "recompute": ("full",)}),
    "tp2 cp2 dp2, etp2 ep4": (8, "gqa", {"tp": 2, "cp": 2, "etp": 2, "ep": 4}),
    "dp8, ep8": (8, "windowed", {"ep": 8}),
    "pp4 tp2, ep2": (8, "mla", {"pp": 4, "tp": 2, "ep": 2, "layout": "Ett|t|tm|mL"}),
    "pp2 vp3 dp4, ep4": (8, "gqa", {"pp": 2, "vp": 3, "ep": 4, "layout": "E|tt|t|t|m|L"}),
    "cp8, etp1 ep8": (8, "gqa", {"cp": 8, "ep": 8}),
    "tp2 cp2 dp2 pp2, etp1 ep4": (16, "gqa", {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    "tp2 cp2 dp2 pp2, etp1 ep8, latent": (16, "mla", {"tp": 2, "cp": 2, "pp": 2, "ep": 8}),
    "tp4 cp2 pp2 vp2, etp2 ep2": (
        16,
        "mla",
        {"tp": 4, "cp": 2, "pp": 2, "vp": 2, "etp": 2, "ep": 2, "layout": "Et|tt|tm|mL"},
    ),
    "tp4 dp4, etp4 ep2": (16, "gqa", {"tp": 4, "etp": 4, "ep": 2, "mbs": 2}),
    "pp4 cp2 dp2, ep2 edp2": (16, "windowed", {"pp": 4, "cp": 2, "ep": 2, "recompute": ("layernorm", "moe_act")}),
}
# With the ranks of a host. Capacity counts by rank and micro-batch: the same where neither tp nor cp cuts those.
FLEX = {"dispatcher": "flex", "flex_backend": "torch"}
DISPATCHED: dict[str, tuple[int, str, dict[str, Any], int]] = {
    "tp2 dp2, etp2 ep2, allgather": (4, "mla", {"tp": 2, "etp": 2, "ep": 2, "dispatcher": "allgather"}, 4),
    "dp4, ep4, flex over two hosts": (4, "gqa", {"ep": 4, **FLEX}, 2),
    "pp2 dp2, ep2, padded to capacity": (4, "padded", {"pp": 2, "ep": 2, "routing": "drop"}, 4),
    "tp2 cp2, ep4, balanced against the step": (4, "step-balanced", {"tp": 2, "cp": 2, "ep": 4}, 4),
}
REST_DISPATCHED: dict[str, tuple[int, str, dict[str, Any], int]] = {
    "cp2 pp2, ep2, allgather": (4, "gqa", {"cp": 2, "pp": 2, "ep": 2, "dispatcher": "allgather"}, 4),
    "dp4, ep4, allgather, weighed after": (
        4,
        "windowed",
        {"ep": 4, "dispatcher": "allgather", "memory_efficient_permutation": False},
        4,
    ),
    "tp2 dp2, etp2 ep2, flex, weighed after": (
        4,
        "mla",
        {"tp": 2, "etp": 2, "ep": 2, "memory_efficient_permutation": False, **FLEX},
        2,
    ),
    "pp2 dp2, ep2, flex with all recomputed": (4, "gqa", {"pp": 2, "ep": 2, "recompute": ("full",), **FLEX}, 1),
    "dp4, ep4, copies dropped": (4, "dropping", {"ep": 4, "routing": "drop"}, 4),
    "dp4, ep4, copies dropped, flex": (4, "dropping", {"ep": 4, "routing": "drop", **FLEX}, 2),
    "dp4, ep4, copies dropped, allgather": (4, "dropping", {"ep": 4, "routing": "drop", "dispatcher": "allgather"}, 4),
    "dp2 pp2, flex padded to capacity": (4, "padded", {"pp": 2, "ep": 2, "routing": "drop", **FLEX}, 2),
    "pp2 tp2, recomputed, balanced against the step": (
        4,
        "step-balanced",
        {"pp": 2, "tp": 2, "ep": 2, "recompute": ("moe",)},
        4,
    ),
    "tp2 cp2 dp2, etp2 ep4, flex over two hosts": (8, "gqa", {"tp": 2, "cp": 2, "etp": 2, "ep": 4, **FLEX}, 4),
    "dp8, ep8, flex over four hosts": (8, "windowed", {"ep": 8, **FLEX}, 2),
    "tp2 dp4, ep8, allgather": (8, "mla", {"tp": 2, "ep": 8, "dispatcher": "allgather"}, 8),
    "dp4, ep4, flex beside other micro-batches": (4, "gqa", {"ep": 4, "ep_overlap": True, **FLEX}, 2),
    "dp4, ep4, dropping beside other micro-batches": (
        4,
        "dropping",
        {"ep": 4, "ep_overlap": True, "routing": "drop"},
        4,
    ),
    "dp4, ep4, allgather beside the shared expert": (
        4,
        "gqa",
        {"ep": 4, "shared_expert_overlap": True, "dispatcher": "allgather"},
        4,
    ),
    "tp2 dp2, etp2 ep2, flex beside the shared expert": (
        4,
        "gqa",
        {"tp": 2, "etp": 2, "ep": 2, "shared_expert_overlap": True, **FLEX},
        2,
    ),
}


@pytest.mark.parametrize("case", quick_and_slow(QUICK, REST))
def test_folded_equals_alone(pools: Pools, case: tuple[int, str, dict[str, Any]]) -> None:
    assert_equals_alone(pools, case)


@pytest.mark.parametrize("case", quick_and_slow(DISPATCHED, REST_DISPATCHED))
def test_dispatched_equals_alone(pools: Pools, case: tuple[int, str, dict[str, Any], int]) -> None:
    num_gpus, model, changes, ranks_per_host = case
    expected = alone(model, changes.get("mbs", 1), changes.get("routing", "balanced"))
    assert_same_run(expected, pools[num_gpus].run(train_on_hosts, model, num_gpus, changes, ranks_per_host))


def test_training_moves() -> None:
    for model in ("gqa", "mla", "windowed"):
        losses = alone(model).losses
        assert losses[-1] < losses[0] - 0.1
