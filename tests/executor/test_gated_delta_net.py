"""The gated delta net in a model: its formula, every folding of it, what it keeps, and what a plan may not ask."""

from typing import Any

import pytest

from tests.executor.folding_cases import assert_equals_alone, quick_and_slow
from tests.executor.pools import Pools

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
