"""Clones of hot experts: tokens are rerouted as planned, and training is what it is without them."""

from typing import Any

import pytest
import torch

from moeplan.echo import Clone, EchoPlan, echo_plan
from moeplan.errors import InvalidInputError
from moeplan.executor.check import check_supported
from moeplan.executor.echo import Echo
from moeplan.executor.mesh import build_mesh
from moeplan.folding import Folding
from tests.executor.cases import GQA_MODEL, tiny_plan
from tests.executor.folding_cases import alone, assert_same_run, train_folded
from tests.executor.pools import Pools


def test_first_copies_of_a_token_order_go_to_clones() -> None:
    echo = Echo(build_mesh(Folding(1), 0), 4, 1)
    echo.num_local = 2  # as if two ranks shared the four experts
    plan = EchoPlan(2, 1, (Clone(0, 1, 0, (2, 9)),))
    index = torch.tensor([[1, 0], [0, 3], [2, 0], [0, 1]])
    assert echo.reroute(index, plan).tolist() == [[1, 5], [5, 4], [3, 0], [0, 1]]


def test_two_clones_of_one_expert_fill_in_turn() -> None:
    echo = Echo(build_mesh(Folding(1), 0), 3, 2)
    echo.num_local = 1
    plan = EchoPlan(1, 2, (Clone(2, 0, 1, (1,)), Clone(2, 1, 0, (2,))))
    index = torch.full((5, 1), 2)
    assert echo.reroute(index, plan).flatten().tolist() == [2, 4, 4, 6, 6]
    assert echo.reroute(index, EchoPlan(1, 2, ())).flatten().tolist() == [6] * 5


def test_everyone_plans_alike(pools: Pools) -> None:
    plans = pools[2].run(plan_of_rank, [[0, 1], [0, 0], [0, 3]])
    assert plans[0] == plans[1]
    assert plans[0] == echo_plan([[4, 1, 0, 1], [4, 1, 0, 1]], 2, 1)


def plan_of_rank(rank: int, index: list[list[int]]) -> EchoPlan:
    mesh = build_mesh(Folding(2, ep=2), rank)
    return Echo(mesh, 4, 1).plan(torch.tensor(index))


@pytest.mark.parametrize(
    "changes",
    [
        {"ep": 2, "echo_slots": 1},
        {"ep": 2, "tp": 2, "echo_slots": 3, "recompute": ("moe_act", "layernorm")},
        {"ep": 2, "echo_slots": 1, "recompute": ("moe",), "dispatcher": "allgather"},
        {"ep": 2, "pp": 1, "cp": 2, "echo_slots": 2, "memory_efficient_permutation": False},
    ],
)
def test_training_is_what_it_is_without_clones(pools: Pools, changes: dict[str, Any]) -> None:
    assert_same_run(alone("gqa", 1), pools[2].run(train_folded, "gqa", 2, changes))


@pytest.mark.parametrize("changes", [{"ep": 4, "echo_slots": 1}, {"tp": 2, "etp": 2, "ep": 2, "echo_slots": 1}])
def test_four_ranks(pools: Pools, changes: dict[str, Any]) -> None:
    assert_same_run(alone("mla", 1), pools[4].run(train_folded, "mla", 4, changes))


def test_what_echo_does_not_go_with() -> None:
    for changes in ({"ep": 1}, {"ep": 2, "routing": "drop"}):
        with pytest.raises(ValueError, match="echo_slots"):
            tiny_plan(GQA_MODEL, 2, echo_slots=1, **changes)
    moe = GQA_MODEL.moe
    assert moe is not None
    biased = GQA_MODEL.model_copy(update={"moe": moe.model_copy(update={"mlp_bias": True})})
    with pytest.raises(ValueError, match="echo_slots: clones experts without biases"):
        tiny_plan(biased, 2, ep=2, echo_slots=1)
    with pytest.raises(InvalidInputError, match="echo_slots"):
        check_supported(tiny_plan(GQA_MODEL, 2, ep=2, echo_slots=1, precision="fp8_current"))
