"""One form of the balancing loss for micro-batches, sequences and packs."""

import torch

from moeplan.executor.balance import TokenSets, sets_balance_loss
from moeplan.executor.mesh import plan_mesh
from moeplan.kernels.router import Routing
from moeplan.model_spec import Moe, Router
from tests.executor.cases import GQA_MODEL, tiny_plan

E, K = 4, 2
MOE = Moe(num_experts=E, top_k=K, expert_ffn_size=8, router=Router(aux_loss="seq_aux_loss", aux_loss_coeff=0.3))


def drawn(num_tokens: int) -> Routing:
    generator = torch.Generator().manual_seed(1)
    share_TE = torch.rand(num_tokens, E, generator=generator, dtype=torch.float64).softmax(1)
    return Routing(share_TE[:, :K], share_TE.topk(K).indices, share_TE)


def by_hand(routing: Routing, first: int, end: int) -> float:
    """Loss coeff E sum_e f_e P_e of some tokens."""
    chosen, num = routing.expert_index_TK[first:end], end - first
    terms = ((chosen == e).sum() / (num * K) * routing.share_TE[first:end, e].mean() for e in range(E))
    return 0.3 * E * sum(term.item() for term in terms)


def loss(routing: Routing, set_L: list[int] | None, num_tokens: tuple[int, ...], num_step_tokens: int) -> float:
    group = plan_mesh(tiny_plan(GQA_MODEL, 1), 0).tp_cp
    sets = TokenSets(None if set_L is None else torch.tensor(set_L), num_tokens, group)
    return sets_balance_loss(routing, MOE, sets, num_step_tokens).item()


def test_each_set_counts_by_its_tokens_and_padding_does_not() -> None:
    routing = drawn(8)
    torch.testing.assert_close(loss(routing, None, (8,), 8), by_hand(routing, 0, 8))
    # A micro-batch of four of 32 tokens of a step.
    torch.testing.assert_close(loss(routing, None, (8,), 32), by_hand(routing, 0, 8) / 4)
    sets = [0, 0, 0, 0, 0, 1, 1, 2]  # of five tokens, of two, and one of padding
    expected = (5 * by_hand(routing, 0, 5) + 2 * by_hand(routing, 5, 7)) / 7
    torch.testing.assert_close(loss(routing, sets, (5, 2), 7), expected)
