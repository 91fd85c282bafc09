"""Rules of a stack's recipes: each condition by itself, and the first rule that states a feature wins."""

from dataclasses import replace
from typing import Any

import pytest

from moeplan.simulator.stack_defaults import DefaultRule, Features, Setting, features

SETTING = Setting(
    model="deepseek-v3",
    is_moe=True,
    hardware="gb300",
    scale_up_domain_gpus=72,
    precision="mxfp8",
    backend="hybridep",
    sharding="optimizer",
)
# A condition that the setting meets, and one that it does not.
CONDITIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"moe": True}, {"moe": False}),
    ({"scale_up": "rack"}, {"scale_up": "node"}),
    ({"sharding": "optimizer"}, {"sharding": "full"}),
    ({"hardware": ("b200", "gb300")}, {"hardware": ("b200",)}),
    ({"models": ("deepseek-v3",)}, {"models": ("kimi-k2",)}),
    ({"precisions": ("bf16", "mxfp8")}, {"precisions": ("bf16",)}),
    ({"backends": ("hybridep",)}, {"backends": ("deepep", "alltoall")}),
]


def rule(set_to: dict[str, Any], **conditions: Any) -> DefaultRule:
    return DefaultRule(**conditions, set=Features(**set_to))


@pytest.mark.parametrize("met, unmet", CONDITIONS)
def test_every_condition_must_be_met(met: dict[str, Any], unmet: dict[str, Any]) -> None:
    others = {key: value for good, _ in CONDITIONS for key, value in good.items()}
    assert rule({}).meets(SETTING)
    assert rule({}, **met).meets(SETTING)
    assert rule({}, **others).meets(SETTING)
    assert not rule({}, **unmet).meets(SETTING)
    assert not rule({}, **others | unmet).meets(SETTING)


def test_eight_gpus_are_a_node() -> None:
    assert rule({}, scale_up="node").meets(replace(SETTING, scale_up_domain_gpus=8))


def test_the_first_rule_that_states_a_feature_wins() -> None:
    rules = (
        rule({"ep_overlap": True}, moe=False),
        rule({"ep_overlap": False}, moe=True),
        rule({"ep_overlap": True, "delay_wgrad": True}),
    )
    found = features(rules, SETTING)
    assert (found.ep_overlap, found.delay_wgrad, found.cuda_graph) == (False, True, None)
