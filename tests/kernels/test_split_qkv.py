"""What every back end that splits a projection must do; a new one inherits Contract."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeplan.kernels.rotary import rotary_tables
from moeplan.kernels.split_qkv import BACKENDS, split_qkv

contract = settings(suppress_health_check=[HealthCheck.differing_executors], max_examples=6, deadline=None)
EPS = 1e-3


def _inputs(shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = (shape, shape[3:], shape[3:])
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def _formula(x: torch.Tensor, weight: torch.Tensor | None, positions: int) -> torch.Tensor:
    """Head by head as complex numbers: shares no code with any back end."""
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    half = x.shape[-1] // 2
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * 100.0 ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


class Contract:
    backend: str

    def _check(self, sizes: tuple[int, ...], dtype: torch.dtype, *, has_norms: bool) -> None:
        B, S, N, M, D = sizes
        inputs = _inputs((B, S, N + 2 * M, D), dtype)[: 3 if has_norms else 1]
        exact = [one.detach().double().requires_grad_() for one in inputs]
        tables = rotary_tables(torch.arange(S), D, 100.0, torch.promote_types(dtype, torch.float32))
        norms = (inputs[1], inputs[2]) if has_norms else None
        got = split_qkv(inputs[0], M, tables, norms, EPS, backend=self.backend)
        q, k, v = exact[0].split([N, M, M], 2)
        weights = exact[1:] if has_norms else (None, None)
        expected = (_formula(q, weights[0], S), _formula(k, weights[1], S), v)
        generator = torch.Generator().manual_seed(1)
        # Gradients of queries and values come transposed, as attention leaves them.
        directions = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in expected]
        directions[::2] = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in directions[::2]]
        grads = torch.autograd.grad(got, inputs, [one.to(dtype) for one in directions])
        expected_grads = torch.autograd.grad(expected, exact, directions)
        for one, other in zip((*got, *grads), (*expected, *expected_grads), strict=True):
            assert (one.shape, one.dtype) == (other.shape, dtype)
            error = float((one.detach().double() - other.detach()).norm() / other.detach().norm().clamp(min=1e-6))
            # bf16: the projection's norm, its rotation and both directions are rounded to 8 bits; fp32 sums otherwise.
            assert error < {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.2e-2}[dtype]

    @contract
    @given(st.tuples(*(st.integers(1, most) for most in (2, 5, 5, 2))), st.integers(1, 5), st.booleans())
    def test_output_and_gradients_are_those_of_the_formula(
        self, sizes: tuple[int, ...], half: int, has_norms: bool
    ) -> None:
        self._check((*sizes, 2 * half), torch.float64, has_norms=has_norms)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("has_norms", [True, False])
    def test_more_rows_than_a_program_takes(self, dtype: torch.dtype, has_norms: bool) -> None:
        self._check((2, 19, 8, 2, 128), dtype, has_norms=has_norms)


class TestReference(Contract):
    backend = "reference"


class TestTorch(Contract):
    backend = "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
class TestTriton(Contract):
    backend = "triton"


def test_every_back_end_has_a_contract_test() -> None:
    assert {contract.backend for contract in Contract.__subclasses__()} == set(BACKENDS)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_without_norms_values_are_a_tensor_of_their_own(backend: str) -> None:
    (qkv, *norms), tables = _inputs((1, 2, 4, 4), torch.float32), rotary_tables(torch.arange(2), 4, 100.0)
    *_, v = split_qkv(qkv, 1, tables, backend=backend)
    assert v.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr()
    *_, v = split_qkv(qkv, 1, tables, (norms[0], norms[1]), EPS, backend=backend)
    assert v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
