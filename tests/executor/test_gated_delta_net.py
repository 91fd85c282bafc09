"""The gated delta net in a model: its formula, every folding of it, what it keeps, and what a plan may not ask."""

from typing import Any

import pytest

from moeplan.mixers import GatedDeltaNet
from moeplan.model_spec import LayerKind
from moeplan.simulator.activations import activation_bytes
from moeplan.simulator.stack import load_stack
from tests.executor.folding_cases import assert_equals_alone, quick_and_slow
from tests.executor.pools import Pools
from tests.executor.saved_bytes import layer_kept_bytes
from tests.executor.test_saved_bytes import GATED, small_model, small_plan

DOCUMENTS = {"packed_lengths": (4, 8, 4)}
QUICK: dict[str, tuple[int, str, dict[str, Any]]] = {
    "cp2, documents": (2, "delta-net", {"cp": 2, "mbs": 2, **DOCUMENTS}),
    "tp2, ep2": (2, "delta-net", {"tp": 2, "ep": 2}),
}
SLOW: dict[str, tuple[int, str, dict[str, Any]]] = {
    "pp2": (2, "delta-net", {"pp": 2, "layout": "Ett|ttmL"}),
    "cp2 alone": (2, "delta-net", {"cp": 2}),
    "full sharding, ep2": (2, "delta-net", {"sharding": "full", "ep": 2}),
    "tp2, documents": (2, "delta-net", {"tp": 2, **DOCUMENTS}),
    "ep2 beside other micro-batches": (2, "delta-net", {"ep": 2, "ep_overlap": True, "delay_wgrad": True}),
    "everything on the host": (2, "delta-net", {"ep": 2, "offload_layers": 3}),
    "tp2 cp2, etp2 ep2": (4, "delta-net", {"tp": 2, "cp": 2, "etp": 2, "ep": 2}),
    "cp4, heads of attention split in pairs": (
        4,
        "delta-net",
        {"cp": 4, "cp_comm": "a2a+p2p", "cp_a2a_size": 2, "ep": 4},
    ),
    "cp2 pp2 vp2, recomputed": (
        4,
        "delta-net",
        {
            "cp": 2,
            "pp": 2,
            "vp": 2,
            "ep": 2,
            "layout": "Et|ttt||mL",
            "recompute": ("layernorm", "core_attn", "moe_act"),
        },
    ),
    "full sharding, tp2 cp2, full recompute": (
        4,
        "delta-net",
        {"sharding": "full", "tp": 2, "cp": 2, "recompute": ("full",)},
    ),
}


@pytest.mark.parametrize("case", quick_and_slow(QUICK, SLOW))
def test_folded_equals_alone(pools: Pools, case: tuple[int, str, dict[str, Any]]) -> None:
    assert_equals_alone(pools, case)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp32"},
        {"recompute": ("layernorm",)},
        {"recompute": ("core_attn", "moe")},
        {"recompute": ("full",)},
        {"tp": 2, "num_gpus": 2},
        {"cp": 2, "num_gpus": 2},
        {"packed_lengths": (64, 128, 64)},
        {"precision": "fp8_current", "dense": True},
        {"dense": True},
    ],
    ids=str,
)
def test_what_a_layer_keeps_is_what_the_native_stack_predicts(changes: dict[str, Any]) -> None:
    dense = changes.get("dense", False)
    mixer = GatedDeltaNet(num_k_heads=4, num_v_heads=8, k_head_dim=32, v_head_dim=32)
    model = small_model(GATED, dense=dense).model_copy(update={"linear_mixer": mixer, "attention_period": 2})
    plan = small_plan(model, **{key: value for key, value in changes.items() if key != "dense"})
    kind = LayerKind("linear", "dense" if dense else "moe")
    expected = activation_bytes(plan.model, kind, plan.point, load_stack("native"))
    assert layer_kept_bytes(plan) == pytest.approx(expected, rel=0.01)
