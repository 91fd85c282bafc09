"""One form of the balancing loss for micro-batches, sequences and packs."""

import torch
from torch import Tensor

from moeplan.executor.balance import TokenSets, attach_balance
from moeplan.executor.mesh import plan_mesh
from moeplan.kernels.router import Routing, Totals, count_tokens
from moeplan.model_spec import Moe, Router
from tests.executor.cases import GQA_MODEL, tiny_plan

E, K = 4, 2
MOE = Moe(num_experts=E, top_k=K, expert_ffn_size=8, router=Router(aux_loss="seq_aux_loss", aux_loss_coeff=0.3))


def drawn(num_tokens: int) -> tuple[Routing, Tensor]:
    """A routing and its shares."""
    generator = torch.Generator().manual_seed(1)
    share_TE = torch.rand(num_tokens, E, generator=generator, dtype=torch.float64).softmax(1).requires_grad_()
    index_TK = share_TE.topk(K).indices
    totals = Totals(share_TE.sum(0), count_tokens(index_TK, E)[0])
    return Routing(share_TE[:, :K], index_TK, share_TE, totals), share_TE


def by_hand(routing: Routing, share_TE: Tensor, first: int, end: int) -> float:
    """Loss coeff E sum_e f_e P_e of some tokens."""
    chosen, num = routing.expert_index_TK[first:end], end - first
    terms = ((chosen == e).sum() / (num * K) * share_TE[first:end, e].mean() for e in range(E))
    return 0.3 * E * sum(term.item() for term in terms)


def loss(set_L: list[int] | None, num_tokens: tuple[int, ...], num_step_tokens: int) -> float:
    """Of eight tokens: linear in the shares, it is the sum of shares times its gradient."""
    routing, share_TE = drawn(8)
    group = plan_mesh(tiny_plan(GQA_MODEL, 1), 0).tp_cp
    sets = TokenSets(None if set_L is None else torch.tensor(set_L), num_tokens, group)
    probs_LK = attach_balance(routing.probs_TK, routing, MOE, sets, num_step_tokens)
    (grad_TE,) = torch.autograd.grad((probs_LK * 0).sum(), share_TE)
    return (share_TE * grad_TE).sum().item()


def test_each_set_counts_by_its_tokens_and_padding_does_not() -> None:
    routing, share_TE = drawn(8)
    torch.testing.assert_close(loss(None, (8,), 8), by_hand(routing, share_TE, 0, 8))
    # A micro-batch of four of 32 tokens of a step.
    torch.testing.assert_close(loss(None, (8,), 32), by_hand(routing, share_TE, 0, 8) / 4)
    sets = [0, 0, 0, 0, 0, 1, 1, 2]  # of five tokens, of two, and one of padding
    expected = (5 * by_hand(routing, share_TE, 0, 5) + 2 * by_hand(routing, share_TE, 5, 7)) / 7
    torch.testing.assert_close(loss(sets, (5, 2), 7), expected)
