"""Gradients that GEMMs add to the main gradients of a step, against sums in float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeplan.kernels.grouped_weight_grad import BACKENDS, add_grouped_weight_grad_
from moeplan.kernels.main_grad import MainGrad, main_grad_of, set_main_grad
from moeplan.kernels.weight_grad import add_weight_grad_

contract = settings(suppress_health_check=[HealthCheck.differing_executors], max_examples=12)


def test_the_first_gradient_of_a_step_is_written_and_the_others_are_added() -> None:
    main = MainGrad(torch.full((3,), torch.nan))
    for expected in (1.0, 3.0):
        main.add_(torch.full((3,), expected - max(0.0, expected - 2), dtype=torch.bfloat16))
        assert main.total.tolist() == [1.0 if expected == 1 else 3.0] * 3
        main.is_clear = False
    main.clear_()
    main.add_(torch.ones(3))
    assert main.total.tolist() == [1.0] * 3


def test_a_step_without_a_gradient_ends_in_zeros() -> None:
    main = MainGrad(torch.full((2,), torch.nan))
    main.finish_()
    assert main.total.tolist() == [0.0, 0.0]
    main.add_(torch.ones(2))
    main.finish_()
    assert main.total.tolist() == [1.0, 1.0]


def test_a_parameter_has_a_main_gradient_only_where_it_was_given_one() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert main_grad_of(weight) is None
    main = MainGrad(torch.zeros(2))
    set_main_grad(weight, main)
    assert main_grad_of(weight) is main


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_dense_gradient_is_the_product_of_its_operands(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x_TI, grad_TO = (torch.randn(30, width, generator=generator, dtype=torch.float64).to(dtype) for width in (8, 6))
    main = MainGrad(torch.full((6, 8), torch.nan, dtype=torch.promote_types(dtype, torch.float32)))
    for count in (1, 2):
        add_weight_grad_(main, grad_TO, x_TI)
        expected = count * (grad_TO.double().t() @ x_TI.double())
        torch.testing.assert_close(main.total.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-5)


class Contract:
    backend: str
    dtype = torch.float32
    H, F = 16, 24

    def _run(self, num_rows: list[int]) -> None:
        generator = torch.Generator().manual_seed(sum(num_rows))
        T, E = sum(num_rows), len(num_rows)
        x_TH = torch.randn(T, self.H, generator=generator).to(self.dtype)
        grad_TF = torch.randn(T, self.F, generator=generator).to(self.dtype)
        offsets_E = torch.tensor(num_rows).cumsum(0).to(torch.int32)
        main = MainGrad(torch.full((E, self.H, self.F), torch.nan))
        parts = zip(x_TH.double().split(num_rows), grad_TF.double().split(num_rows), strict=True)
        once = torch.stack([x.t() @ grad for x, grad in parts])
        for count in (1, 2, 3):
            add_grouped_weight_grad_(main, x_TH, grad_TF, offsets_E, backend=self.backend)
            # Products of 16-bit operands are exact in fp32; the torch back end rounds their sum to the operands' type.
            error = float((main.total - count * once).norm()) / max(1.0, float((count * once).norm()))
            assert error < 2 * torch.finfo(self.dtype).eps

    @contract
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    def test_ragged_groups(self, num_rows: list[int]) -> None:
        self._run(num_rows)

    @pytest.mark.parametrize("num_rows", [[0, 0, 0], [0, 70, 0], [64, 0, 128], [1] * 7, [0] * 31 + [65]])
    def test_empty_experts_whole_blocks_and_one_that_takes_all(self, num_rows: list[int]) -> None:
        self._run(num_rows)


class TestByExpert(Contract):
    backend = "by_expert"


class TestTorch(Contract):
    backend = "torch"


class TestTorchBf16(Contract):
    backend, dtype = "torch", torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
class TestTriton(Contract):
    backend = "triton"

    @pytest.mark.parametrize("backend", ["triton", "triton_rows32", "triton_tile128"])
    def test_several_tiles_of_the_output(self, backend: str) -> None:
        self.backend, self.H, self.F = backend, 136, 264  # a tile is 128 x 256 or 128 x 128
        self._run([70, 0, 3])


def test_back_ends_are_all_tested() -> None:
    from moeplan.kernels.grouped_weight_grad_triton import CONFIGS

    assert set(BACKENDS) == {"by_expert", "torch", *CONFIGS}
