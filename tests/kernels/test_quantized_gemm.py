"""What every back end of quantized GEMMs must do; a new one inherits Contract.

Tolerances, as relative errors of the norm: a random tensor is off by 2.6 % in e4m3 with one scale, 5.2 % in e5m2, 9.6 %
in e2m1 with blocks of 16, so a product of two by the root of the sum of their squares. Where back ends meet, both read
the same stored bits and differ by bf16's rounding: 2**-9, or 2**-8 under the interpreter, which cuts.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from moeplan.kernels import quantized_gemm_reference as reference
from moeplan.kernels.padded_rows import PaddedRows, dense_rows, padded_rows
from moeplan.kernels.quantized_gemm import BACKENDS, QuantizedGemm, QuantizedOperands, backend_of
from moeplan.kernels.recipes import RECIPES
from moeplan.kernels.row_map import row_map
from tests.kernels.fake_scaled_mm import fake_kernels
from tests.kernels.fp8_interpreter import exact_fp8

# Root of the sum of squares of both operands' errors, a fifth on top.
FORWARD_ERROR = {"fp8_delayed": 0.045, "fp8_current": 0.045, "fp8_blockwise": 0.044, "mxfp8": 0.047, "nvfp4": 0.19}
GRADIENT_ERROR = {"fp8_delayed": 0.07, "fp8_current": 0.07, "fp8_blockwise": 0.044, "mxfp8": 0.047, "nvfp4": 0.26}
ROWS = {
    "ragged": [70, 0, 130, 3],
    "one takes all": [0, 0, 150, 0],
    "one matrix": [150],
    "many empty": [5 if expert % 8 == 0 else 0 for expert in range(32)],
}
WIDTH, OUT = 128, 256


def _rows(counts: list[int]) -> PaddedRows:
    if len(counts) == 1:
        return dense_rows(counts[0], torch.device("cpu"))
    return padded_rows(torch.tensor(counts).cumsum(0).int(), sum(counts))


def _operands(counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(counts))
    shapes = ((sum(counts), WIDTH), (sum(counts), OUT), (len(counts), OUT, WIDTH))
    x, grad, weight = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.bfloat16(), (grad * 1e-3).bfloat16(), (weight * 0.02).bfloat16()


def _gradient_operands(backend: QuantizedGemm, name: str, counts: list[int]) -> QuantizedOperands:
    recipe, rows, (x_RC, grad_RO, _) = RECIPES[name], _rows(counts), _operands(counts)
    grad = backend.quantize_rows(grad_RO, rows, recipe, is_gradient=True)
    return QuantizedOperands(grad.turned, backend.quantize_rows(x_RC, rows, recipe, is_gradient=False).turned, rows)


def _products(backend: QuantizedGemm, name: str, counts: list[int]) -> list[Tensor]:
    """Output, gradient of the input, and weight gradients: written, and added to ones."""
    recipe, rows = RECIPES[name], _rows(counts)
    x_RC, grad_RO, weight_EOC = _operands(counts)
    x = backend.quantize_rows(x_RC, rows, recipe, is_gradient=False)
    grad = backend.quantize_rows(grad_RO, rows, recipe, is_gradient=True)
    weight = backend.quantize_weights(weight_EOC, recipe)
    written, added = torch.full(weight_EOC.shape, 7.0), torch.ones(weight_EOC.shape)
    parts = (QuantizedOperands(grad.turned, x.turned, rows),)
    backend.gradient_(written, parts, recipe, add=False)
    backend.gradient_(added, parts, recipe, add=True)
    forward = backend.multiply(x.as_is, weight.as_is, rows, recipe)
    backward = backend.multiply(grad.as_is, weight.turned, rows, recipe, is_gradient=True)
    return [forward, backward, written, added - 1]


def _exact(counts: list[int]) -> list[Tensor]:
    x_RC, grad_RO, weight_EOC = (tensor.double() for tensor in _operands(counts))
    groups = list(zip(x_RC.split(counts), grad_RO.split(counts), weight_EOC, strict=True))
    forward = torch.cat([x @ weight.t() for x, _, weight in groups])
    backward = torch.cat([grad @ weight for _, grad, weight in groups])
    weights = torch.stack([grad.t() @ x for x, grad, _ in groups])
    return [forward, backward, weights, weights]


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


class Contract:
    backend: str
    recipes = tuple(RECIPES)

    @pytest.mark.parametrize("case", ROWS)
    def test_products_are_off_by_the_rounding_of_their_operands(self, case: str) -> None:
        counts = ROWS[case]
        for name in self.recipes:
            with exact_fp8():
                products = _products(BACKENDS[self.backend](), name, counts)
            errors = [_relative(got, exact) for got, exact in zip(products, _exact(counts), strict=True)]
            assert errors[0] < FORWARD_ERROR[name], name
            assert max(errors[1:]) < GRADIENT_ERROR[name], name

    def test_an_expert_without_rows_gets_no_gradient(self) -> None:
        for name in self.recipes:
            with exact_fp8():
                *_, written, added = _products(BACKENDS[self.backend](), name, ROWS["one takes all"])
            assert written.flatten(1).any(1).tolist() == [False, False, True, False]
            assert added.flatten(1).any(1).tolist() == [False, False, True, False]

    def test_no_rows_at_all(self) -> None:
        for name in self.recipes:
            forward, backward, written, added = _products(BACKENDS[self.backend](), name, [0, 0])
            assert (len(forward), len(backward)) == (0, 0)
            assert not written.any()
            assert not added.any()

    @pytest.mark.parametrize("other", [[0, 140, 5, 1], [0, 0, 0, 0]])
    def test_two_micro_batches_give_what_they_give_one_by_one(self, other: list[int]) -> None:
        backend = BACKENDS[self.backend]()
        for name in self.recipes:
            with exact_fp8():
                parts = [_gradient_operands(backend, name, counts) for counts in (ROWS["ragged"], other)]
                for add in (False, True):
                    together, apart = (torch.full((4, OUT, WIDTH), 7.0) for _ in range(2))
                    backend.gradient_(together, parts, RECIPES[name], add=add)
                    backend.gradient_(apart, parts[:1], RECIPES[name], add=add)
                    backend.gradient_(apart, parts[1:], RECIPES[name], add=True)
                    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5, msg=name)

    def test_a_weight_in_fp32_is_rounded_to_bf16_first(self) -> None:
        weight_EAB = torch.randn(3, OUT, WIDTH, generator=torch.Generator().manual_seed(2)) * 0.02
        backend = BACKENDS[self.backend]()
        for name in self.recipes:
            recipe, results = RECIPES[name], []
            for weight in (weight_EAB, weight_EAB.bfloat16()):
                with exact_fp8():
                    amax = backend.weight_amax(weight, recipe)
                    given = amax if recipe.scaling.scale == "fp32" else None
                    stored = [part for form in backend.quantize_weights(weight, recipe, given) for part in form[:2]]
                results.append([part.view(torch.uint8) if part.itemsize == 1 else part for part in (amax, *stored)])
            assert torch.equal(amax, reference.weight_amax(weight_EAB, recipe)), name
            assert all(torch.equal(got, expected) for got, expected in zip(*results, strict=True)), name

    def test_tokens_are_multiplied_as_their_copies_are(self) -> None:
        index_TK = torch.tensor([[0, 2], [2, 1], [2, 0], [1, 0]] * 30)
        copied, generator = row_map(index_TK, 4), torch.Generator().manual_seed(1)
        tokens_TC = torch.randn(120, WIDTH, generator=generator).bfloat16()
        weight_EOC = torch.randn(4, OUT, WIDTH, generator=generator).bfloat16()
        rows, backend = padded_rows(copied.offsets_E, 240), BACKENDS[self.backend]()
        for name in self.recipes:
            recipe, products = RECIPES[name], []
            for x_RC, how in ((tokens_TC, copied), (tokens_TC[copied.token_of_row_R], None)):
                total_ECC = torch.empty(4, WIDTH, WIDTH)
                with exact_fp8():
                    x = backend.quantize_rows(x_RC, rows, recipe, is_gradient=False, copied=how)
                    weight = backend.quantize_weights(weight_EOC, recipe)
                    y_RO = backend.multiply(x.as_is, weight.as_is, rows, recipe)
                    parts = (QuantizedOperands(x.turned, x.turned, rows),)
                    backend.gradient_(total_ECC, parts, recipe, add=False)
                products.append((y_RO, total_ECC))
            assert all(torch.equal(got, expected) for got, expected in zip(*products, strict=True)), name


class TestReference(Contract):
    backend = "reference"


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_quantized_on_gpu.py")
class TestTriton(Contract):
    backend = "triton"
    recipes = ("fp8_current", "fp8_blockwise")

    @pytest.mark.parametrize("name", recipes)
    def test_stored_bits_and_products_are_those_of_the_reference(self, name: str) -> None:
        counts = ROWS["ragged"]
        with exact_fp8():
            got = _products(BACKENDS["triton"](), name, counts)
        for one, other in zip(got, _products(reference, name, counts), strict=True):
            assert _relative(one, other) < 2**-7


@pytest.mark.skipif(torch.cuda.is_available(), reason="its kernels are those of the GPU: test_quantized_on_gpu.py")
class TestBlackwell(Contract):
    backend = "torch_blackwell"
    recipes = ("mxfp8", "nvfp4")

    @pytest.fixture(autouse=True)
    def kernels(self) -> Iterator[None]:
        with fake_kernels():
            yield


def test_every_back_end_has_a_contract_test() -> None:
    assert {contract.backend for contract in Contract.__subclasses__()} == set(BACKENDS)


def test_a_cpu_multiplies_by_the_reference() -> None:
    assert {backend_of(name, torch.zeros(1, 128, 128)) for name in RECIPES} == {"reference"}


@pytest.mark.parametrize("major, on_gpu", [(8, "reference"), (9, "triton")])
def test_hopper_takes_blocks_of_whole_tiles(monkeypatch: pytest.MonkeyPatch, major: int, on_gpu: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    whole, cut = (cast("Tensor", SimpleNamespace(is_cuda=True, device=0, shape=(2, 128, side))) for side in (256, 160))
    assert backend_of("fp8_blockwise", whole) == backend_of("fp8_current", whole) == on_gpu
    assert (backend_of("fp8_blockwise", cut), backend_of("fp8_current", cut)) == ("reference", on_gpu)
