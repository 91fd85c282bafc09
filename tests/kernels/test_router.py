import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.kernels.router import (
    RouterOptions,
    attach_gradient,
    attach_loss,
    balance_gradient,
    count_tokens,
    route,
    router_logits,
    updated_bias,
    z_loss,
)

LOGITS_TE = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, -1.0, 0.5, 0.0]], dtype=torch.float64)


def _random_logits(T: int, E: int) -> torch.Tensor:
    return torch.randn(T, E, generator=torch.Generator().manual_seed(T * E), dtype=torch.float64)


def test_softmax_normalised_over_the_chosen_is_a_softmax_of_their_logits() -> None:
    routing = route(LOGITS_TE, RouterOptions(top_k=2))
    assert routing.expert_index_TK.tolist() == [[3, 2], [0, 2]]
    torch.testing.assert_close(routing.probs_TK, torch.softmax(torch.tensor([[3.0, 2.0], [3.0, 0.5]]).double(), -1))
    torch.testing.assert_close(routing.share_TE, torch.softmax(LOGITS_TE, -1))


def test_softmax_not_normalised_keeps_the_scores_of_all_experts() -> None:
    routing = route(LOGITS_TE, RouterOptions(top_k=2, normalize_top_k=False))
    total = sum(math.exp(x) for x in range(4))
    assert routing.probs_TK[0].tolist() == pytest.approx([math.exp(3) / total, math.exp(2) / total])


def test_sigmoid_is_normalised_over_the_chosen_for_weights_and_over_all_for_the_share() -> None:
    routing = route(LOGITS_TE, RouterOptions(top_k=2, score_function="sigmoid", scaling_factor=2.5))
    scores = [1 / (1 + math.exp(-x)) for x in range(4)]
    assert routing.probs_TK[0].tolist() == pytest.approx([2.5 * s / (scores[3] + scores[2]) for s in scores[:1:-1]])
    assert routing.share_TE is not None
    assert routing.share_TE[0].tolist() == pytest.approx([s / sum(scores) for s in scores])


def test_the_only_chosen_expert_keeps_its_score() -> None:
    routing = route(LOGITS_TE, RouterOptions(top_k=1, score_function="sigmoid"))
    assert routing.probs_TK[0].item() == pytest.approx(1 / (1 + math.exp(-3)))


def test_bias_changes_who_is_chosen_and_not_the_weight() -> None:
    bias_E = torch.tensor([10.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    routing = route(LOGITS_TE, RouterOptions(top_k=2, score_function="sigmoid"), bias_E)
    assert routing.expert_index_TK[0].tolist() == [0, 3]
    low, high = 0.5, 1 / (1 + math.exp(-3))
    assert routing.probs_TK[0].tolist() == pytest.approx([low / (low + high), high / (low + high)])


def test_groups_are_ranked_by_the_sum_of_their_best_scores() -> None:
    # Group 0 holds the best expert, but its best two sum to 0.95 against 1.1 and 1.0: top 2 of 3 leave it out.
    scores = torch.tensor([[0.9, 0.05, 0.0, 0.55, 0.55, 0.1, 0.5, 0.5, 0.0]], dtype=torch.float64)
    options = RouterOptions(top_k=4, score_function="sigmoid", num_groups=3, top_groups=2)
    assert sorted(route(torch.logit(scores, 1e-9), options).expert_index_TK[0].tolist()) == [3, 4, 6, 7]


@given(st.integers(1, 6), st.sampled_from([(8, 1, 1, 3), (8, 4, 2, 4), (6, 3, 1, 2)]), st.booleans())
def test_choices_are_distinct_and_weights_sum_to_the_scale(
    T: int, shape: tuple[int, int, int, int], is_sigmoid: bool
) -> None:
    E, num_groups, top_groups, K = shape
    options = RouterOptions(K, "sigmoid" if is_sigmoid else "softmax", num_groups, top_groups, scaling_factor=1.5)
    routing = route(_random_logits(T, E), options)
    for choice in routing.expert_index_TK.tolist():
        assert len(set(choice)) == K
        assert len({expert // (E // num_groups) for expert in choice}) <= top_groups
    torch.testing.assert_close(routing.probs_TK.sum(1), torch.full((T,), 1.5, dtype=torch.float64))
    assert routing.share_TE is not None
    torch.testing.assert_close(routing.share_TE.sum(1), torch.ones(T, dtype=torch.float64))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_gradients_through_weights_shares_and_losses_are_exact(score_function: str) -> None:
    options = RouterOptions(2, "softmax" if score_function == "softmax" else "sigmoid", scaling_factor=2.0)

    def losses(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routing = route(logits, options)
        assert routing.share_TE is not None
        return routing.probs_TK, routing.share_TE, z_loss(logits, 0.1, 2)

    assert torch.autograd.gradcheck(losses, (LOGITS_TE.clone().requires_grad_(),))


def test_counts_by_sequence() -> None:
    index_TK = torch.tensor([[0, 1], [0, 3], [2, 3], [3, 2]])
    assert count_tokens(index_TK, 4).tolist() == [[2, 1, 2, 3]]
    assert count_tokens(index_TK, 4, num_sequences=2).tolist() == [[2, 1, 0, 1], [0, 0, 2, 2]]


def test_balance_loss_is_the_coefficient_when_balanced_and_e_times_it_when_one_expert_takes_all() -> None:
    E, T, K = 4, 8, 2
    uniform_2E = torch.full((2, E), T / 2 / E)  # of two sets
    grad_2E = balance_gradient(uniform_2E * K, T / 2 * K, T, 0.01)
    assert (uniform_2E * grad_2E).sum().item() == pytest.approx(0.01)
    one_hot_1E = torch.tensor([[0.0, 0.0, 1.0, 0.0]]) * T
    assert (one_hot_1E * balance_gradient(one_hot_1E, T, T, 0.01)).sum().item() == pytest.approx(0.04)


def test_totals_are_sums_over_tokens() -> None:
    routing = route(_random_logits(6, 4), RouterOptions(top_k=2), totals=True)
    assert routing.share_TE is not None
    assert routing.totals is not None
    torch.testing.assert_close(routing.totals.share_E, routing.share_TE.sum(0))
    assert torch.equal(routing.totals.num_copies_E, torch.bincount(routing.expert_index_TK.flatten(), minlength=4))


def test_z_loss_of_equal_logits() -> None:
    logits_TE, expected = torch.zeros(3, 4), 0.5 * math.log(4) ** 2
    assert z_loss(logits_TE, 0.5, 3).item() == pytest.approx(expected)
    is_real_T = torch.tensor([True, False, True])
    assert z_loss(logits_TE, 0.5, 3, is_real_T).item() == pytest.approx(expected * 2 / 3)


def test_bias_moves_toward_the_mean_load() -> None:
    bias_E = updated_bias(torch.zeros(4), torch.tensor([10.0, 4.0, 5.0, 1.0]), 1e-3)
    torch.testing.assert_close(bias_E, torch.tensor([-1e-3, 1e-3, 0.0, 1e-3]))


def test_an_attached_loss_reaches_its_inputs() -> None:
    x, weight = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    y = attach_loss(x * 5, weight**2)
    assert torch.equal(y, x * 5)
    y.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.tolist() == [5.0] * 3
    assert weight.grad.item() == 2 * 2.0


def test_an_attached_gradient_reaches_its_place() -> None:
    x, at = torch.ones(3, requires_grad=True), torch.zeros(2, requires_grad=True)
    y = attach_gradient(x * 5, at * 2, torch.tensor([1.0, -3.0]))
    assert torch.equal(y, x * 5)
    y.sum().backward()
    assert x.grad is not None
    assert at.grad is not None
    assert x.grad.tolist() == [5.0] * 3
    assert at.grad.tolist() == [2.0, -6.0]


def test_logits_are_fp32_at_least() -> None:
    x_TH, weight_EH = torch.ones(2, 3), torch.ones(4, 3)
    assert router_logits(x_TH.bfloat16(), weight_EH.bfloat16())[1].dtype == torch.float32
    assert router_logits(x_TH.double(), weight_EH.double())[1].dtype == torch.float64


def test_gradients_of_logits_and_of_what_else_reads_the_input_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TH, weight_EH = (
        torch.randn(num, 3, generator=generator, dtype=torch.float64, requires_grad=True) for num in (5, 4)
    )

    def both(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_TH, logits_TE = router_logits(x_TH, weight_EH)
        return x_TH.sin(), logits_TE

    torch.testing.assert_close(both(x_TH, weight_EH), (x_TH.sin(), x_TH @ weight_EH.t()))
    assert torch.autograd.gradcheck(both, (x_TH, weight_EH))
    assert torch.autograd.gradcheck(lambda x: both(x, weight_EH.detach())[0], (x_TH,))
    assert torch.autograd.gradcheck(lambda w: both(x_TH.detach(), w)[1], (weight_EH,))


def test_logits_of_half_precision_are_exact_and_their_gradients_close() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TH = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
    weight_EH = torch.randn(8, 32, generator=generator).bfloat16().requires_grad_()
    direction_TE = torch.randn(64, 8, generator=generator)
    _, logits_TE = router_logits(x_TH, weight_EH)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x_TH, weight_EH)]
    _, expected_TE = router_logits(*exact)
    torch.testing.assert_close(logits_TE.double(), expected_TE, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad((logits_TE * direction_TE).sum(), (x_TH, weight_EH))
    expected = torch.autograd.grad((expected_TE * direction_TE).sum(), exact)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one - other).norm() / other.norm()) < 1e-2
