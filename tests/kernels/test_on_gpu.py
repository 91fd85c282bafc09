"""Kernels on a GPU against references in float64: relative error of the norm, by dtype."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import get_args

import pytest
import torch

from moeplan.executor.linear import look_up
from moeplan.kernels import activation_reference, permute_reference
from moeplan.kernels.accumulate import accumulate_
from moeplan.kernels.activation import ActivationKind, activation
from moeplan.kernels.causal_conv import causal_conv
from moeplan.kernels.cross_entropy import logit_gradient_, logit_stats
from moeplan.kernels.delta_rule import gated_delta_rule
from moeplan.kernels.delta_rule_reference import DeltaTokens
from moeplan.kernels.gated_norm import gated_norm
from moeplan.kernels.grouped_gemm import grouped_gemm
from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.norm import residual_rms_norm, rms_norm_reference
from moeplan.kernels.padded_rows import padded_rows
from moeplan.kernels.permute import permute, unpermute
from moeplan.kernels.rotary import apply_rotary, rotary_tables
from moeplan.kernels.router import router_logits
from moeplan.kernels.row_map import row_map
from moeplan.kernels.split_qkv import split_qkv

pytestmark = pytest.mark.gpu
BF16_ERROR = 8e-3  # two roundings to 8 bits


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def _check(
    run: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> None:
    """Output and gradients of every floating-point input."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    got, expected = run(*inputs), reference(*exact)
    direction = torch.randn_like(got)
    got_grads = torch.autograd.grad(got, inputs, direction)
    expected_grads = torch.autograd.grad(expected, exact, direction.double())
    for one, other in zip((got, *got_grads), (expected, *expected_grads), strict=True):
        assert one.shape == other.shape
        assert float((one.double() - other).detach().norm() / other.detach().norm()) < BF16_ERROR


@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_activation(kind: ActivationKind) -> None:
    inputs = [_normal(300, 1536), torch.rand(300, device="cuda", requires_grad=True)]
    _check(lambda x, p: activation(x, kind, p), lambda x, p: activation_reference.activation(x, kind, p), inputs)


@pytest.mark.parametrize("has_update, width", [(False, 2048), (True, 2048), (True, 16384)])
def test_residual_norm(has_update: bool, width: int) -> None:
    def reference(x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        total = x if update is None else x + update
        return torch.cat((total, rms_norm_reference(total, weight, 1e-6)))

    def run(x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat(residual_rms_norm(x, update, weight, 1e-6))

    inputs = [_normal(300, width), *([_normal(300, width)] if has_update else []), _normal(width)]
    if has_update:
        _check(run, reference, inputs)
    else:
        _check(lambda x, w: run(x, None, w), lambda x, w: reference(x, None, w), inputs)


def test_rotary_of_a_view() -> None:
    cos, sin = rotary_tables(torch.arange(64, device="cuda"), 128, 1e4)
    heads = _normal(2, 64, 10, 128)

    def reference(x: torch.Tensor) -> torch.Tensor:
        first, second = x[:, :, 2:8].chunk(2, -1)
        turn, other = cos[:, None].double(), sin[:, None].double()
        return torch.cat((first * turn - second * other, second * turn + first * other), -1)

    _check(lambda x: apply_rotary(x[:, :, 2:8], cos, sin), reference, [heads])


@pytest.mark.parametrize("has_norms", [True, False])
def test_split_of_a_projection(has_norms: bool) -> None:
    tables = rotary_tables(torch.arange(100, device="cuda"), 128, 1e4)
    inputs = [_normal(3, 100, 20, 128), *((_normal(128), _normal(128)) if has_norms else ())]

    def run(backend: str) -> Callable[..., torch.Tensor]:
        def split(qkv: torch.Tensor, *norms: torch.Tensor) -> torch.Tensor:
            pair = (norms[0], norms[1]) if norms else None
            return torch.cat(split_qkv(qkv, 2, tables, pair, 1e-6, backend=backend), 2)

        return split

    _check(run("triton"), run("reference"), inputs)


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_permutation(top_k: int) -> None:
    rows = row_map(torch.rand(200, 16, device="cuda").topk(top_k).indices, 16)
    _check(lambda x: permute(x, rows), lambda x: permute_reference.permute(x, rows), [_normal(200, 2304)])
    shape = (200 * top_k, 2304)
    _check(lambda x: unpermute(x, rows), lambda x: permute_reference.unpermute(x, rows), [_normal(*shape)])


def test_cross_entropy() -> None:
    logits_TV = _normal(100, 5000).detach() * 3
    targets_T = torch.randint(5000, (100,), device="cuda")
    exact = logits_TV.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets_T, reduction="none")
    (expected_grad,) = torch.autograd.grad(expected.sum(), exact)
    highest_T, sum_T, target_T = logit_stats(logits_TV, targets_T)
    log_sum_T = highest_T + sum_T.log()
    torch.testing.assert_close((log_sum_T - target_T).double(), expected.detach(), rtol=1e-5, atol=1e-5)
    got = logit_gradient_(logits_TV, log_sum_T, torch.ones(100, device="cuda"), targets_T)
    assert float((got - expected_grad).norm() / expected_grad.norm()) < BF16_ERROR


def test_router_logits() -> None:
    inputs = [_normal(512, 1024), _normal(64, 1024)]
    _check(lambda x, w: router_logits(x, w)[1], lambda x, w: x @ w.t(), inputs)

    def both(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.cat((x.sin(), logits), 1)

    _check(lambda x, w: both(*router_logits(x, w)), lambda x, w: both(x, x @ w.t()), inputs)


def test_grouped_gemm_with_an_empty_expert() -> None:
    ends_E = torch.tensor([100, 100, 260, 300], dtype=torch.int32, device="cuda")

    def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        starts = [0, *ends_E.tolist()]
        parts = [x[start:end] @ weight[e] for e, (start, end) in enumerate(pairwise(starts))]
        return torch.cat(parts)

    _check(lambda x, w: grouped_gemm(x, w, ends_E), reference, [_normal(300, 256), _normal(4, 256, 512)])


@pytest.mark.parametrize("num_rows", [[0, 5, 128, 129, 0], [0] * 511 + [1000], [0, 0]])
def test_padding_is_that_of_a_cpu(num_rows: list[int]) -> None:
    offsets_E = torch.tensor(num_rows).cumsum(0).to(torch.int32)
    got, expected = padded_rows(offsets_E.cuda(), sum(num_rows)), padded_rows(offsets_E, sum(num_rows))
    for name in ("padded_end_E", "expert_of_tile", "row_of_tile", "count_of_tile"):
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name


def test_accumulation_over_two_dtypes() -> None:
    total_N, part_N = torch.randn(100_003, device="cuda"), _normal(100_003).detach()
    expected = total_N + part_N
    torch.testing.assert_close(accumulate_(total_N, part_N), expected, rtol=0, atol=0)


@pytest.mark.parametrize("num_ids, width", [(1, 2048), (256, 2048), (32768, 7168), (300, 1030)])
def test_embedding_gradients_are_added_to_the_main_gradient(num_ids: int, width: int) -> None:
    weight_VH = _normal(32768, width)
    row_T = torch.randint(num_ids, (4099,), device="cuda")
    row_T[::7] = -1
    main = MainGrad(torch.full((32768, width), torch.nan, device="cuda"))
    expected_VH = torch.zeros(32768, width, device="cuda", dtype=torch.float64)
    for _ in range(2):  # a total that is clear, and one that is not
        direction_TH = _normal(4099, width).detach()
        look_up(row_T, weight_VH, main, has_gaps=True).backward(direction_TH)
        expected_VH.index_add_(0, row_T[row_T >= 0], direction_TH[row_T >= 0].double())
    assert weight_VH.grad is None
    assert float((main.total - expected_VH).norm() / expected_VH.norm()) < 1e-5  # sums in fp32


@pytest.mark.parametrize("backend", ["torch", "triton", "fla"])
def test_gated_delta_rule(backend: str) -> None:
    if backend == "fla" and find_spec("fla") is None:
        pytest.skip("flash-linear-attention is not installed")
    documents = (100, 156)

    def run(*x: torch.Tensor, backend: str) -> torch.Tensor:
        tokens = DeltaTokens(x[0], x[1], x[2], -torch.nn.functional.softplus(x[3].float()), x[4].sigmoid())
        return gated_delta_rule(tokens, documents, backend=backend)

    inputs = [_normal(2, 256, 2, 128), _normal(2, 256, 2, 128), _normal(2, 256, 4, 128)]
    inputs += [_normal(2, 256, 4), _normal(2, 256, 4)]
    _check(partial(run, backend=backend), partial(run, backend="torch"), inputs)


@pytest.mark.parametrize("has_bias", [False, True])
def test_causal_convolution(has_bias: bool) -> None:
    def run(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor, backend: str) -> torch.Tensor:
        return causal_conv(x[..., 64:], weight, bias[0] if bias else None, (100, 156), backend=backend)

    inputs = [_normal(2, 256, 1064), _normal(1000, 4), *([_normal(1000)] if has_bias else [])]
    _check(partial(run, backend="triton"), partial(run, backend="torch"), inputs)


@pytest.mark.parametrize("gate_first, weight_shape", [(False, (128,)), (True, (4, 128))])
def test_gated_norm(gate_first: bool, weight_shape: tuple[int, ...]) -> None:
    def run(x: torch.Tensor, projected: torch.Tensor, weight: torch.Tensor, backend: str) -> torch.Tensor:
        gate = projected[..., 64:576].unflatten(2, (4, 128))
        return gated_norm(x, gate, weight, 1e-6, gate_first=gate_first, backend=backend)

    inputs = [_normal(2, 300, 4, 128), _normal(2, 300, 600), _normal(*weight_shape)]
    _check(partial(run, backend="triton"), partial(run, backend="torch"), inputs)
