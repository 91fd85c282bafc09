"""Gradients that GEMMs add to the main gradients of a step, against sums in float64."""

import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeplan.kernels.grouped_weight_grad import BACKENDS, add_grouped_weight_grad_, add_parts_
from moeplan.kernels.main_grad import MainGrad, main_grad_of, set_main_grad
from moeplan.kernels.permute import permute
from moeplan.kernels.row_map import row_map
from moeplan.kernels.weight_grad import add_weight_grad_
from moeplan.kernels.weight_grad_pairs import Operands, Pairs

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

    def _operands(self, num_rows: list[int], seed: int) -> tuple[Operands, torch.Tensor]:
        """Those of a micro-batch, and the gradient in float64."""
        generator = torch.Generator().manual_seed(sum(num_rows) + seed)
        x_TH = torch.randn(sum(num_rows), self.H, generator=generator).to(self.dtype)
        grad_TF = torch.randn(sum(num_rows), self.F, generator=generator).to(self.dtype)
        parts = zip(x_TH.double().split(num_rows), grad_TF.double().split(num_rows), strict=True)
        offsets_E = torch.tensor(num_rows).cumsum(0).to(torch.int32)
        return Operands(x_TH, grad_TF, offsets_E), torch.stack([x.t() @ grad for x, grad in parts])

    def _run(self, num_rows: list[int]) -> None:
        (first, grad), (other, other_grad) = self._operands(num_rows, 0), self._operands(num_rows[::-1], 1)
        both = grad + other_grad
        for steps in ((((first,), grad), ((first, other), grad + both)), (((other, first), both),)):
            main = MainGrad(torch.full(grad.shape, torch.nan))
            for parts, expected in steps:
                add_parts_(main, parts, backend=self.backend)
                # Products of 16-bit operands are exact in fp32; the torch back end rounds sums to the operands' type.
                error = float((main.total - expected).norm()) / max(1.0, float(expected.norm()))
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

    quack = {name for name in BACKENDS if name.startswith("quack_")}  # on a GPU alone
    assert set(BACKENDS) - quack == {"by_expert", "torch", *CONFIGS}


@pytest.mark.parametrize("num, expected", [(1, [1]), (2, [0, 2]), (3, [1, 0, 2]), (4, [0, 2, 0, 2])])
def test_none_waits_at_the_end_of_a_step(num: int, expected: list[int]) -> None:
    pairs, one = Pairs(num), Operands(torch.ones(2, 4), torch.ones(2, 8), torch.tensor([2]))
    for _ in range(2):
        assert [len(pairs.take(one)) for _ in range(num)] == expected
        assert pairs.waiting_bytes == 0


def test_the_first_of_two_waits_for_the_second() -> None:
    main = MainGrad(torch.full((1, 4, 8), torch.nan), pairs=Pairs(2))
    offsets_E = torch.tensor([3], dtype=torch.int32)
    add_grouped_weight_grad_(main, torch.ones(3, 4), torch.ones(3, 8), offsets_E)
    assert main.is_clear
    assert main.pairs is not None
    assert main.pairs.waiting_bytes == 4 * 3 * (4 + 8)
    with pytest.raises(AssertionError, match="never came"):
        main.finish_()
    add_grouped_weight_grad_(main, torch.ones(3, 4), torch.full((3, 8), 2.0), offsets_E)
    assert main.total.unique().tolist() == [9.0]
    main.finish_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_copies_of_tokens_wait_as_those(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    totals = []
    for has_map in (False, True):
        main = MainGrad(
            torch.full((6, 4, 8), torch.nan, dtype=torch.promote_types(dtype, torch.float32)), pairs=Pairs(2)
        )
        generator.manual_seed(5)
        for is_second in (False, True):
            rows = row_map(torch.rand(20, 6, generator=generator).topk(3).indices, 6)
            x_RH = permute(torch.randn(20, 4, generator=generator).to(dtype), rows)
            grad_RF = torch.randn(60, 8, generator=generator).to(dtype)
            is_alive = weakref.ref(x_RH)
            add_grouped_weight_grad_(main, x_RH, grad_RF, rows.offsets_E, copied=rows if has_map else None)
            del x_RH
            assert (is_alive() is not None) == (not is_second and not has_map)
            assert main.pairs is not None
            waiting = 0 if is_second else ((20 if has_map else 60) * 4 + 60 * 8) * dtype.itemsize
            assert main.pairs.waiting_bytes == waiting
        totals.append(main.total)
    assert torch.equal(*totals)
