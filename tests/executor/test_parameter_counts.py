"""A rank of the executor holds as many parameters as the simulator counts for the native stack."""

from typing import Any

import pytest
import torch

from moeplan.executor.model import Transformer
from moeplan.simulator.placement import rank_elements
from moeplan.simulator.stack import load_stack
from tests.executor.cases import tiny_plan
from tests.executor.folding_cases import GQA, MLA
from tests.executor.saved_bytes import rank_zero


@pytest.mark.parametrize("model", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("folding", [{}, {"tp": 2, "ep": 2}, {"tp": 4, "etp": 2, "ep": 2}])
def test_a_rank_holds_what_the_simulator_counts(model: Any, folding: dict[str, int]) -> None:
    """With an MTP depth, whose projection every rank of tp holds whole."""
    plan = tiny_plan(model, folding.get("tp", 1), **folding)
    assert plan.model.num_mtp_layers
    splits = load_stack("native").time.splits_mtp_projection
    counted = rank_elements(
        plan.model, plan.layout, plan.pp, tp=plan.tp, etp=plan.etp, ep=plan.ep, splits_mtp_projection=splits
    )[0]
    with rank_zero(plan) as mesh:
        held = Transformer(plan, mesh, seed=1, device=torch.device("cpu")).table.entries
    assert sum(entry.parameter.numel() for entry in held) == pytest.approx(sum(counted), abs=1e-3)
