"""Saved bytes of a layer under each dispatcher, over ranks that share its experts."""

from collections.abc import Iterator
from typing import Any

import pytest

from moeplan.executor.mesh import build_mesh
from moeplan.model_spec import MOE_LAYER
from moeplan.plan import Plan
from moeplan.simulator.activations import activation_bytes
from moeplan.simulator.stack import load_stack
from tests.executor.gloo_pool import GlooPool, gloo_pool
from tests.executor.saved_bytes import layer_kept_bytes_on
from tests.executor.test_saved_bytes import small_model, small_plan


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(4, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


def kept(rank: int, plan: Plan) -> int:
    return layer_kept_bytes_on(plan, build_mesh(plan.folding, rank))


@pytest.mark.parametrize("weigh_before", [True, False])
@pytest.mark.parametrize("degrees", [{"ep": 4}, {"ep": 2, "etp": 2}])
@pytest.mark.parametrize(
    "dispatcher", [{}, {"dispatcher": "allgather"}, {"dispatcher": "flex", "flex_backend": "torch"}]
)
def test_rows_of_all_ranks_are_those_of_balanced_routing(
    pool: GlooPool, dispatcher: dict[str, Any], degrees: dict[str, int], weigh_before: bool
) -> None:
    """However tokens choose, the ranks together hold as many rows."""
    plan = small_plan(small_model(), num_gpus=4, memory_efficient_permutation=weigh_before, **degrees, **dispatcher)
    expected = activation_bytes(plan.model, MOE_LAYER, plan.point, load_stack("native"))
    assert sum(pool.run(kept, plan)) / 4 == pytest.approx(expected, rel=0.01)
