"""Gradients of an embedding added to its main gradient, against torch's own."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from moeplan.executor.linear import look_up
from moeplan.kernels.embedding import add_rows_
from moeplan.kernels.main_grad import MainGrad

contract = settings(suppress_health_check=[HealthCheck.differing_executors], max_examples=8, deadline=None)
V = 12


class Contract:
    backend: str

    def _check(self, rows: list[int], width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(len(rows))
        row_T = torch.tensor(rows, dtype=torch.int64)
        main = MainGrad(torch.full((V, width), torch.nan, dtype=torch.promote_types(dtype, torch.float32)))
        expected_VH = torch.zeros(V, width, dtype=torch.float64)
        for _ in range(2):  # a total that is clear, and one that is not
            grad_TH = torch.randn(len(rows), width, generator=generator, dtype=torch.float64).to(dtype)
            add_rows_(main, grad_TH, row_T, backend=self.backend)
            expected_VH.index_add_(0, row_T[row_T >= 0], grad_TH.double()[row_T >= 0])
        error = 1e-13 if dtype == torch.float64 else 1e-5  # sums of less than 200 numbers near 1
        torch.testing.assert_close(main.total.double(), expected_VH, rtol=error, atol=20 * error)
        untouched_V = torch.tensor([row not in rows for row in range(V)])
        assert not main.total[untouched_V].any()

    @contract
    @given(st.lists(st.integers(-1, V - 1), max_size=70))
    def test_any_rows(self, rows: list[int]) -> None:
        self._check(rows)

    @pytest.mark.parametrize(
        "rows",
        [
            [3] * 130,  # one row in five chunks
            [0] * 32 + [1] * 32 + [2] * 32,  # rows that end where chunks do
            [-1] * 40 + [5] * 60 + [7] * 5 + [11] * 33,
            [-1] * 70,
            [0] * 31 + [4] * 34 + [11],
        ],
    )
    def test_rows_of_many_tokens(self, rows: list[int]) -> None:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        self._check([rows[int(index)] for index in order])

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_types_and_widths_beyond_a_block(self, dtype: torch.dtype) -> None:
        self._check([1, 7, 1, -1, 0] * 8, 1030, dtype)


class TestTorch(Contract):
    backend = "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
class TestTriton(Contract):
    backend = "triton"


@pytest.mark.parametrize("has_gaps", [False, True])
def test_a_look_up_hands_its_gradient_to_the_main_gradient_alone(has_gaps: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weight_VH = torch.randn(V, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    row_T = torch.randint(-1 if has_gaps else 0, V, (40,), generator=generator)
    expected_TH = F.embedding(row_T.clamp(min=0), weight_VH) * (row_T >= 0)[:, None]
    direction_TH = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    (expected_VH,) = torch.autograd.grad(expected_TH, weight_VH, direction_TH)
    main = MainGrad(torch.full((V, 8), torch.nan, dtype=torch.float64))
    got_TH = look_up(row_T, weight_VH, main, has_gaps=has_gaps)
    got_TH.backward(direction_TH)
    assert torch.equal(got_TH, expected_TH)
    assert weight_VH.grad is None
    torch.testing.assert_close(main.total, expected_VH)
