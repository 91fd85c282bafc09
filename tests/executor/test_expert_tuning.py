"""What a comparison of the experts' back ends holds: shapes, keys, candidates, rows; on a CPU their sums as well."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from moeplan.executor import expert_tuning
from moeplan.executor.candidate_timing import Candidates
from moeplan.executor.expert_tuning import (
    LARGE_EXPERT_ROWS,
    ExpertProduct,
    drawn_offsets,
    expert_shapes,
    experts_key,
    may_take_quack,
    measure_experts,
    product_candidates,
)
from moeplan.executor.mesh import build_mesh
from moeplan.kernels import grouped_gemm_quack
from moeplan.kernels.weight_grad_pairs import Operands
from tests.executor.cases import GQA_MODEL, tiny_plan

PLAN = tiny_plan(GQA_MODEL, 1, precision="bf16")
CPU = torch.device("cpu")
SHAPE = (4, 16, 24)


def test_shapes_are_those_of_the_parameters() -> None:
    moe = GQA_MODEL.moe
    assert moe is not None
    first, second = expert_shapes(PLAN, build_mesh(PLAN.folding, 0))
    assert first == (moe.num_experts, GQA_MODEL.hidden_size, 2 * moe.expert_ffn_size)
    assert second == (moe.num_experts, moe.expert_ffn_size, GQA_MODEL.hidden_size)


def test_rows_that_differ_from_call_to_call_and_graphs_are_not_for_quack() -> None:
    assert may_take_quack(PLAN)
    assert not may_take_quack(tiny_plan(GQA_MODEL, 2, ep=2, precision="bf16"))
    assert not may_take_quack(PLAN.replace(cuda_graph=("full_iteration",)))


def test_comparisons_of_other_candidates_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_gemm_quack, "installed_version", lambda: "0.6.5")
    keys = {
        experts_key(SHAPE, num_rows, num_added, with_quack=with_quack)
        for num_rows in (64, 128)
        for num_added in (1, 2)
        for with_quack in (False, True)
    }
    assert len(keys) == 8
    monkeypatch.setattr(grouped_gemm_quack, "installed_version", lambda: None)
    assert experts_key(SHAPE, 64, 1, with_quack=True) in keys  # that of plans which may not take it


@pytest.mark.parametrize(
    "rows, names", [(LARGE_EXPERT_ROWS - 1, ["torch"]), (LARGE_EXPERT_ROWS, ["torch", "by_expert"])]
)
def test_large_experts_may_run_one_by_one(rows: int, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x_RH, weight_EHF = torch.empty(2 * rows, 8, dtype=torch.bfloat16), torch.empty(2, 8, 8, dtype=torch.bfloat16)
    assert product_candidates(x_RH, weight_EHF) == names
    monkeypatch.setattr(grouped_gemm_quack, "takes", lambda *_: True)
    assert product_candidates(x_RH, weight_EHF) == [*names, *grouped_gemm_quack.TILES]
    assert product_candidates(x_RH, weight_EHF, with_quack=False) == names


def test_rows_are_drawn_alike_each_time() -> None:
    ends_E = drawn_offsets(4, 1024, CPU)
    num_rows_E = ends_E.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert torch.equal(ends_E, drawn_offsets(4, 1024, CPU))
    assert ends_E[-1] == 1024
    assert 0 < num_rows_E.min() < 256 < num_rows_E.max()


def _weight_gradients(parts: Sequence[Operands]) -> torch.Tensor:
    """Of all of them in fp32, expert by expert."""
    starts = [0, *parts[0].offsets_E.tolist()]
    return torch.stack(
        [
            torch.stack([part.x_TH[start:end].float().T @ part.grad_TF[start:end].float() for part in parts]).sum(0)
            for start, end in pairwise(starts)
        ]
    )


def test_each_pass_is_what_a_step_runs() -> None:
    torch.manual_seed(0)
    product = ExpertProduct(SHAPE, 64, CPU, num_micro_batches=2)
    y_RF, grad_x_RH = (calls["torch"]() for calls in (product.forward(), product.input_gradient()))
    assert isinstance(y_RF, torch.Tensor)
    assert isinstance(grad_x_RH, torch.Tensor)
    one = product.parts[0]
    for e, (start, end) in enumerate(pairwise([0, *one.offsets_E.tolist()])):
        rows, weight_HF = slice(start, end), product.weight_EHF[e].float()
        torch.testing.assert_close(y_RF[rows].float(), one.x_TH[rows].float() @ weight_HF, atol=0.1, rtol=0.02)
        torch.testing.assert_close(
            grad_x_RH[rows].float(), one.grad_TF[rows].float() @ weight_HF.T, atol=0.1, rtol=0.02
        )


@pytest.mark.parametrize("num_added", [1, 2])
def test_additions_are_those_of_as_many_micro_batches(num_added: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made: list[ExpertProduct] = []

    class Spied(ExpertProduct):
        def additions(self, num_micro_batches: int) -> Candidates:
            made.append(self)
            return super().additions(num_micro_batches)

    def run_once(candidates: Candidates) -> dict[str, float]:
        for run in candidates.values():
            run()
        return dict.fromkeys(candidates, 1.0)

    monkeypatch.setattr(expert_tuning, "ExpertProduct", Spied)
    monkeypatch.setattr(expert_tuning, "compare", run_once)
    found = measure_experts(SHAPE, 64, CPU, num_added, with_quack=True)
    assert found == {name: {"torch": 1.0} for name in ("grouped_gemm", "grouped_input_grad", "grouped_weight_grad")}
    (product,) = made
    assert len(product.parts) == num_added
    torch.testing.assert_close(product.main.total, _weight_gradients(product.parts), atol=0.2, rtol=0.02)


def test_plans_that_may_not_take_quack_have_it_in_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_gemm_quack, "takes", lambda *_: True)
    monkeypatch.setattr(expert_tuning, "compare", lambda candidates: dict.fromkeys(candidates, 1.0))
    for with_quack in (False, True):
        names = {"torch", *(grouped_gemm_quack.TILES if with_quack else ())}
        found = measure_experts(SHAPE, 64, CPU, 1, with_quack=with_quack)
        assert all(set(times_s) == names for times_s in found.values())
