"""Routing, counting and sorting kernels under the interpreter, against plain autograd and a sort."""

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.kernels.router import RouterOptions, count_tokens, route_reference

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
TINY = 1e-20
# Experts, chosen, groups, kept groups.
SHAPES = [(1, 1, 1, 1), (8, 2, 1, 1), (7, 3, 1, 1), (64, 8, 8, 4), (16, 4, 4, 2), (512, 16, 1, 1), (256, 8, 8, 4)]
Score = Literal["softmax", "sigmoid"]


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=4)
@given(T=st.integers(1, 9), normalize=st.booleans(), has_bias=st.booleans(), summed=st.sampled_from([None, 1, 2]))
def test_choices_weights_shares_and_gradients(  # noqa: PLR0917 - Hypothesis passes by name
    shape: tuple[int, int, int, int], score_function: Score, T: int, normalize: bool, has_bias: bool, summed: int | None
) -> None:
    from moeplan.kernels import router_triton

    E, K, num_groups, top_groups = shape
    options = RouterOptions(K, score_function, num_groups, top_groups, 2.5, normalize, summed)
    generator = torch.Generator().manual_seed(T * E)
    logits_TE = torch.randn(T, E, generator=generator, dtype=torch.float64, requires_grad=True)
    bias_E = torch.rand(E, generator=generator, dtype=torch.float64) if has_bias else None
    got = router_triton.route(logits_TE, bias_E, options, TINY, totals=False)
    expected = route_reference(logits_TE, options, bias_E)
    assert expected.share_TE is not None
    assert torch.equal(got[1], expected.expert_index_TK)
    torch.testing.assert_close(got[0], expected.probs_TK)
    torch.testing.assert_close(got[2], expected.share_TE)
    direction_TK, direction_E = (torch.randn(size, generator=generator).double() for size in ((T, K), (1, E)))
    for ours, theirs in (
        ((got[0] * direction_TK).sum(), (expected.probs_TK * direction_TK).sum()),
        ((got[2].sum(0) * direction_E).sum(), (expected.share_TE.sum(0) * direction_E).sum()),
        (
            (got[0] * direction_TK).sum() + (got[2] * direction_E).sum(),
            (expected.probs_TK * direction_TK).sum() + (expected.share_TE * direction_E).sum(),
        ),
    ):
        (grad_TE,) = torch.autograd.grad(ours, logits_TE, retain_graph=True)
        (expected_grad_TE,) = torch.autograd.grad(theirs, logits_TE, retain_graph=True)
        torch.testing.assert_close(grad_TE, expected_grad_TE)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [0, 1, 70])
def test_totals_in_the_place_of_shares(shape: tuple[int, int, int, int], score_function: Score, T: int) -> None:
    from moeplan.kernels import router_triton

    E, K, num_groups, top_groups = shape
    options = RouterOptions(K, score_function, num_groups, top_groups)
    logits_TE = torch.randn(T, E, generator=torch.Generator().manual_seed(E), dtype=torch.float64, requires_grad=True)
    probs_TK, index_TK, share_E, num_copies_E = router_triton.route(logits_TE, None, options, TINY, totals=True)
    expected = route_reference(logits_TE, options)
    assert expected.share_TE is not None
    torch.testing.assert_close(probs_TK, expected.probs_TK)
    assert torch.equal(index_TK, expected.expert_index_TK)
    torch.testing.assert_close(share_E, expected.share_TE.sum(0))
    assert num_copies_E is not None
    assert torch.equal(num_copies_E, torch.bincount(index_TK.flatten(), minlength=E))
    direction_E = torch.randn(E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (grad_TE,) = torch.autograd.grad(probs_TK.square().sum() + (share_E * direction_E).sum(), logits_TE)
    expected_loss = expected.probs_TK.square().sum() + (expected.share_TE * direction_E).sum()
    torch.testing.assert_close(grad_TE, torch.autograd.grad(expected_loss, logits_TE)[0])


def test_scores_that_are_no_numbers_choose_experts_that_there_are() -> None:
    from moeplan.kernels import router_triton

    logits_TE = torch.full((3, 7), torch.nan)
    _, index_TK, _, num_copies_E = router_triton.route(logits_TE, None, RouterOptions(3), TINY, totals=True)
    assert num_copies_E is not None
    assert num_copies_E.sum() == 9
    assert 0 <= int(index_TK.min()) <= int(index_TK.max()) < 7


def test_groups_of_other_numbers_are_left_to_torch() -> None:
    from moeplan.kernels import router_triton

    assert router_triton.is_supported(7, 1)
    assert router_triton.is_supported(256, 8)
    assert not router_triton.is_supported(9, 3)


@settings(max_examples=10)
@given(E=st.sampled_from([1, 8, 128, 512]), rows=st.sampled_from([1, 100, 1025]), sequences=st.integers(1, 3))
def test_counts_are_those_of_torch(E: int, rows: int, sequences: int) -> None:
    from moeplan.kernels import router_triton

    index_SR = torch.randint(E, (sequences, rows), generator=torch.Generator().manual_seed(rows))
    counts_SE = router_triton.count_tokens(index_SR, E)
    assert torch.equal(counts_SE, count_tokens(index_SR[..., None], E, sequences))


@pytest.mark.parametrize("E", [1, 8, 100, 512])
@pytest.mark.parametrize("rows", [0, 1, 128, 300])
def test_rows_are_sorted_by_expert_in_the_order_of_tokens(E: int, rows: int) -> None:
    from moeplan.kernels import row_map_triton

    index_R = torch.randint(E, (rows,), generator=torch.Generator().manual_seed(rows + E))
    slot_of_row_R, row_of_slot_R, offsets_E = row_map_triton.sort_rows(index_R, E)
    assert torch.equal(slot_of_row_R, torch.sort(index_R, stable=True).indices.int())
    assert torch.equal(row_of_slot_R[slot_of_row_R.long()], torch.arange(rows, dtype=torch.int32))
    assert torch.equal(offsets_E, torch.bincount(index_R, minlength=E).cumsum(0).int())
    assert offsets_E.is_contiguous()


def test_one_expert_takes_all() -> None:
    from moeplan.kernels import row_map_triton

    slot_of_row_R, row_of_slot_R, offsets_E = row_map_triton.sort_rows(torch.full((200,), 2), 4)
    assert torch.equal(slot_of_row_R, torch.arange(200, dtype=torch.int32))
    assert torch.equal(row_of_slot_R, slot_of_row_R)
    assert offsets_E.tolist() == [0, 0, 200, 200]
