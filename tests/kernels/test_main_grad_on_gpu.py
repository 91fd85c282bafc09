"""Kernels of main gradients, Adam, routing and sorting on a GPU, compiled, against references."""

import pytest
import torch

from moeplan.kernels.adam import AdamOptions, AdamState, adam_
from moeplan.kernels.grouped_weight_grad import BACKENDS, add_grouped_weight_grad_, add_parts_
from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.permute import permute
from moeplan.kernels.remainders import join, split_
from moeplan.kernels.router import RouterOptions, count_tokens, route, route_reference
from moeplan.kernels.row_map import row_map
from moeplan.kernels.weight_grad import add_weight_grad_
from moeplan.kernels.weight_grad_pairs import Operands, Pairs
from tests.kernels.optional_packages import skip_without

pytestmark = pytest.mark.gpu
FP32_SUM = 1e-5  # sums of exact products in fp32, in another order than the reference's
BF16_SUM = 4e-3  # the torch back end rounds a sum to bf16 before it is added: half of 2**-8


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1))


def test_a_dense_gradient_is_written_first_and_added_then() -> None:
    x_TI, grad_TO = _normal(1000, 512), _normal(1000, 768)
    main = MainGrad(torch.full((768, 512), torch.nan, device="cuda"))
    once = grad_TO.double().t() @ x_TI.double()
    for count in (1, 2, 3):
        add_weight_grad_(main, grad_TO, x_TI)
        assert _error(main.total, count * once) < FP32_SUM


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize(
    "num_rows", [[100, 0, 300, 65], [0, 0, 512], [64, 64], [1, 2, 3], [0, 0], [0] * 255 + [777], [37] * 512]
)
@pytest.mark.parametrize("widths", [(256, 512), (384, 264)])
def test_expert_gradients(backend: str, num_rows: list[int], widths: tuple[int, int]) -> None:
    skip_without(backend)
    (first, grad), (other, other_grad) = (_operands(rows, *widths) for rows in (num_rows, num_rows[::-1]))
    tolerance = BF16_SUM if backend == "torch" else FP32_SUM
    main = MainGrad(torch.full(grad.shape, torch.nan, device="cuda"))
    for parts, expected in (((first,), grad), ((first, other), 2 * grad + other_grad)):
        add_parts_(main, parts, backend=backend)
        assert _error(main.total, expected) < tolerance
    main.clear_()
    add_parts_(main, (other, first), backend=backend)
    assert _error(main.total, grad + other_grad) < tolerance


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("top_k", [2, 8])
def test_tokens_that_wait_give_the_gradients_of_their_copies(backend: str, top_k: int) -> None:
    skip_without(backend)
    totals = []
    for has_map in (False, True):
        torch.manual_seed(3)
        main = MainGrad(torch.full((16, 256, 512), torch.nan, device="cuda"), pairs=Pairs(2))
        for num_elements in (700 * (1 if has_map else top_k) * 256 + 700 * top_k * 512, 0):
            rows = row_map(torch.rand(700, 16, device="cuda").topk(top_k).indices, 16)
            x_RH, grad_RF = permute(_normal(700, 256), rows), _normal(700 * top_k, 512)
            copied = rows if has_map else None
            add_grouped_weight_grad_(main, x_RH, grad_RF, rows.offsets_E, copied=copied, backend=backend)
            assert main.pairs is not None
            assert main.pairs.waiting_bytes == 2 * num_elements
        totals.append(main.total)
    assert torch.equal(*totals)


def _operands(num_rows: list[int], H: int, F: int) -> tuple[Operands, torch.Tensor]:
    x_TH, grad_TF = _normal(sum(num_rows), H), _normal(sum(num_rows), F)
    parts = zip(x_TH.double().split(num_rows), grad_TF.double().split(num_rows), strict=True)
    offsets_E = torch.tensor(num_rows, device="cuda").cumsum(0).to(torch.int32)
    return Operands(x_TH, grad_TF, offsets_E), torch.stack([x.t() @ grad for x, grad in parts])


@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
def test_adam(moment: torch.dtype) -> None:
    options = AdamOptions(1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5)

    def state(backend: str) -> AdamState:
        generator = torch.Generator("cuda").manual_seed(0)
        main, grad, first = torch.randn((3, 100_003), generator=generator, device="cuda")
        second = torch.rand(100_003, generator=generator, device="cuda").to(moment)
        one = AdamState(main, grad, first.to(moment), second, torch.full((), 7.0, device="cuda"), main.bfloat16())
        adam_(one, options, backend=backend)
        return one

    got, expected = state("triton"), state("reference")
    torch.testing.assert_close(got.main_N, expected.main_N, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        got.first_N, expected.first_N, rtol=8e-3 if moment == torch.bfloat16 else 1e-5, atol=1e-6
    )
    assert got.weight_N is not None
    assert torch.equal(got.weight_N, got.main_N.bfloat16())


@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [100_000, 100_003])  # 16 bytes at once, and element by element
def test_adam_of_main_weights_in_halves(size: int, moment: torch.dtype) -> None:
    options = AdamOptions(1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5)
    main, grad, first = torch.randn((3, size), device="cuda")
    first, second = first.to(moment), torch.rand(size, device="cuda").to(moment)
    weight, remainder = torch.empty_like(main, dtype=torch.bfloat16), torch.empty_like(main, dtype=torch.int16)
    split_(main, weight, remainder)
    steps = torch.full((), 7.0, device="cuda")
    whole = AdamState(main, grad, first.clone(), second.clone(), steps)
    halves = AdamState(weight, grad, first.clone(), second.clone(), steps, remainder_N=remainder)
    for one in (whole, halves):
        adam_(one, options, backend="triton")
    joined = join(weight, remainder)
    torch.testing.assert_close(joined, main, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(halves.first_N, whole.first_N, rtol=0, atol=0)
    torch.testing.assert_close(halves.second_N, whole.second_N, rtol=0, atol=0)
    again = weight.clone(), remainder.clone()
    split_(joined, *again)
    assert torch.equal(weight, again[0])
    assert torch.equal(remainder, again[1])


@pytest.mark.parametrize(
    "options",
    [
        RouterOptions(8),
        RouterOptions(1, normalize_top_k=False),
        RouterOptions(16, "sigmoid", scaling_factor=2.5),
        RouterOptions(8, "sigmoid", 8, 4),
    ],
)
@pytest.mark.parametrize("E", [64, 256, 512])
def test_routing(options: RouterOptions, E: int) -> None:
    logits_TE = torch.randn(1001, E, device="cuda", requires_grad=True)
    bias_E = torch.rand(E, device="cuda") if options.score_function == "sigmoid" else None
    got, expected = route(logits_TE, options, bias_E), route_reference(logits_TE, options, bias_E)
    assert float((got.expert_index_TK.sort(1).values == expected.expert_index_TK.sort(1).values).float().mean()) > 0.999
    torch.testing.assert_close(got.probs_TK, expected.probs_TK, rtol=1e-4, atol=1e-6)
    direction_TK, direction_E = torch.randn_like(got.probs_TK), torch.randn(E, device="cuda")
    totalled = route(logits_TE, options, bias_E, totals=True)
    assert totalled.totals is not None
    assert got.share_TE is not None
    assert expected.share_TE is not None
    torch.testing.assert_close(totalled.totals.share_E, expected.share_TE.sum(0), rtol=1e-4, atol=1e-4)
    by_sum = [(got, got.share_TE.sum(0)), (totalled, totalled.totals.share_E), (expected, expected.share_TE.sum(0))]
    *grads, expected_grad = [
        torch.autograd.grad((one.probs_TK * direction_TK).sum() + (share_E * direction_E).sum(), logits_TE)[0]
        for one, share_E in by_sum
    ]
    # Of experts that are nearly level each may take another, or in another order, and gradients then go elsewhere.
    for one, grad_TE in zip((got, totalled), grads, strict=True):
        is_same_T = (one.expert_index_TK == expected.expert_index_TK).all(1)
        assert float(is_same_T.float().mean()) > 0.99
        assert _error(grad_TE[is_same_T], expected_grad[is_same_T].double()) < 1e-3
    assert torch.equal(totalled.totals.num_copies_E, count_tokens(totalled.expert_index_TK, E)[0])
    counts_E = count_tokens(got.expert_index_TK, E)[0]
    assert torch.equal(counts_E, torch.bincount(got.expert_index_TK.flatten(), minlength=E).float())


@pytest.mark.parametrize("E", [1, 100, 512])
def test_rows_are_sorted_as_torch_sorts_them(E: int) -> None:
    index_TK = torch.randint(E, (5000, 8), device="cuda")
    rows = row_map(index_TK, E)
    assert torch.equal(rows.slot_of_row_R, torch.sort(index_TK.flatten(), stable=True).indices.int())
    assert torch.equal(
        rows.row_of_slot_TK.flatten()[rows.slot_of_row_R.long()], torch.arange(40_000, device="cuda").int()
    )
    assert torch.equal(rows.offsets_E, torch.bincount(index_TK.flatten(), minlength=E).cumsum(0).int())
