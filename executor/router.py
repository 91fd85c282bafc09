"""The router: which experts a token goes to, and the losses and biases that balance them (report section 7).

Shapes: L tokens of this rank, K experts per token, E experts, H hidden, S sets of tokens that are balanced apart.
"""

import torch
from torch import Tensor, nn

from moeplan.executor.balance import TokenSets, attach_balance, count_real, pack_sets
from moeplan.executor.collectives import all_reduce, all_reduced
from moeplan.executor.dtypes import at_least_fp32
from moeplan.executor.mesh import Mesh
from moeplan.executor.pack_layout import PackLayout
from moeplan.executor.parameters import ParameterTable, whole_piece
from moeplan.executor.routing import RoutingControl
from moeplan.executor.scopes import scope
from moeplan.kernels.capacity import expert_capacity, within_capacity
from moeplan.kernels.router import (
    RouterOptions,
    Routing,
    attach_gradient,
    attach_loss,
    balance_gradient,
    count_tokens,
    route,
    router_logits,
    updated_bias,
    z_loss,
)
from moeplan.model_spec import Moe
from moeplan.plan import Plan


class Router(nn.Module):
    """Chooses experts, and adds the balancing losses of its micro-batch to the gradient of its probabilities."""

    def __init__(self, plan: Plan, moe: Moe, name: str, mesh: Mesh, table: ParameterTable) -> None:
        super().__init__()
        spec = moe.router
        self.name, self.moe, self.spec, self.mesh = name, moe, spec, mesh
        self.seq_len, self.num_sequences, self.num_tokens = plan.seq_len, plan.mbs, plan.tokens_per_rank
        self.options = RouterOptions(
            top_k=moe.top_k,
            score_function=spec.score_function,
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            scaling_factor=spec.scaling_factor,
            normalize_top_k=spec.normalize_top_k,
            group_score_experts=spec.group_score_experts,
        )
        self.num_step_tokens = plan.tokens_per_step
        self.weight = table.add_whole(f"{name}.weight", (moe.num_experts, plan.model.hidden_size))
        self.logit_bias: nn.Parameter | None = None
        if moe.mlp_bias:
            self.logit_bias = table.add_whole(f"{name}.bias", (moe.num_experts,), std=0.0, is_decayed=False)
        # Selection bias, the same on every rank, and copies routed since its last update.
        zeros = torch.zeros(moe.num_experts, dtype=at_least_fp32(table.dtype), device=table.device)
        self.bias_E = zeros if spec.expert_bias else None
        if self.bias_E is not None and table.weights is not None:
            self.bias_E.copy_(table.weights(whole_piece(f"{name}.expert_bias", (moe.num_experts,))))
        self.num_copies_E = zeros.clone()
        self.counts_load = spec.expert_bias  # or where the run logs it
        # Copies of the step's micro-batches so far, over all ranks of the stage, for the balancing loss of the batch.
        self.step_copies_E, self.num_summed = zeros.clone(), zeros.new_zeros(())
        # Load is counted, recorded and balanced before copies are dropped.
        self.capacity: int | None = None
        if plan.routing == "drop":
            self.capacity = expert_capacity(
                plan.tokens_per_rank, moe.top_k, moe.num_experts, moe.router.capacity_factor
            )
        self.control: RoutingControl | None = None

    def forward(self, x_LH: Tensor, layout: PackLayout | None = None) -> tuple[Tensor, Routing]:
        """x, for all else that reads it (see ``router_logits``), and the chosen experts; no padding is counted."""
        with scope("router"):
            x_LH, logits_LE = router_logits(x_LH, self.weight)
            if self.logit_bias is not None:
                logits_LE = logits_LE + self.logit_bias.to(logits_LE.dtype)
            sets = self._token_sets(layout)
            routing = self._route(logits_LE, totals=sets is None or sets.set_L is None)
            # Where gradients are off, this is validation, or the first of two runs under recompute.
            if self.counts_load and torch.is_grad_enabled():
                self.num_copies_E += self._count(routing, layout)
            probs_LK = self._with_losses(routing, logits_LE, sets, layout)
            index_LK = routing.expert_index_TK
            if self.capacity is not None:
                policy = self.spec.drop_policy
                index_LK = within_capacity(index_LK, probs_LK, self.moe.num_experts, self.capacity, policy)
        return x_LH, Routing(probs_LK, index_LK)

    def _route(self, logits_LE: Tensor, *, totals: bool) -> Routing:
        """The routing of a micro-batch, before any copy is dropped."""
        control = self.control
        if control is None or not control.is_active:
            return route(logits_LE, self.options, self.bias_E, totals=totals)
        micro_batch = control.next_call(self.name)
        forced_LK = control.forced(self.name, micro_batch, logits_LE, self.options)
        routing = route(logits_LE, self.options, self.bias_E, forced_LK, totals=totals)
        control.note(self.name, micro_batch, routing.expert_index_TK)
        return routing

    def _with_losses(
        self, routing: Routing, logits_LE: Tensor, sets: TokenSets | None, layout: PackLayout | None
    ) -> Tensor:
        probs_LK, spec = routing.probs_TK, self.spec
        if sets is not None:
            probs_LK = attach_balance(probs_LK, routing, self.moe, sets, self.num_step_tokens)
        elif spec.aux_loss == "global_aux_loss" and spec.aux_loss_coeff > 0:
            probs_LK = self._attach_step_balance(probs_LK, routing)
        if spec.z_loss_coeff > 0:
            is_real_L = layout.is_real_L if layout is not None else None
            loss = z_loss(logits_LE, spec.z_loss_coeff, self.num_step_tokens, is_real_L)
            probs_LK = attach_loss(probs_LK, loss)
        return probs_LK

    def _token_sets(self, layout: PackLayout | None) -> TokenSets | None:
        """All tokens of the micro-batch, or sequence by sequence, or document by document.

        None where nothing balances them, or the whole step does.
        """
        if self.spec.aux_loss in ("none", "global_aux_loss") or self.spec.aux_loss_coeff == 0:
            return None
        is_apart = self.spec.aux_loss == "seq_aux_loss"
        if layout is not None:
            return pack_sets(layout, per_document=is_apart)
        if not is_apart or self.num_sequences == 1:
            return TokenSets(None, (self.seq_len * self.num_sequences,), self.mesh.tp_cp)
        # Each rank of cp has an equal part of every sequence, and tp splits those parts one after the other.
        first = self.mesh.tp.index * self.num_tokens
        positions_L = torch.arange(first, first + self.num_tokens, device=self.weight.device)
        set_L = positions_L // (self.seq_len // self.mesh.cp.size)
        return TokenSets(set_L, (self.seq_len,) * self.num_sequences, self.mesh.tp_cp)

    def _count(self, routing: Routing, layout: PackLayout | None) -> Tensor:
        """Copies [E] of this rank's tokens by expert."""
        if layout is not None and layout.has_padding:
            return count_real(routing.expert_index_TK, self.moe.num_experts, layout)
        if routing.totals is not None:
            return routing.totals.num_copies_E
        return count_tokens(routing.expert_index_TK, self.moe.num_experts)[0]

    def _attach_step_balance(self, probs_LK: Tensor, routing: Routing) -> Tensor:
        """This rank's part of the loss of its micro-batch against the load of the step so far, on all ranks of dp.

        As Megatron-LM has it (its global_aux_loss): the loads of later micro-batches are not known yet, so the figures
        depend on how many there are.
        """
        assert routing.totals is not None
        share_E, num_copies_E = routing.totals
        num_copies_E = all_reduced(num_copies_E, self.mesh.stage)
        if torch.is_grad_enabled():  # see forward
            self.step_copies_E += num_copies_E
            self.num_summed += 1
        num_copies = self.mesh.dp.size * self.seq_len * self.num_sequences * self.moe.top_k  # of each micro-batch
        set_copies = self.num_summed.clamp(min=1) * num_copies
        coeff = self.spec.aux_loss_coeff
        grad_1E = balance_gradient(self.step_copies_E[None], set_copies, self.num_step_tokens, coeff)
        return attach_gradient(probs_LK, share_E, grad_1E[0])

    @torch.no_grad()
    def end_step(self) -> Tensor | None:
        """One step of aux-free balancing from the loads of the whole batch. Collective over the stage.

        Returns the load of the busiest expert over the mean, where loads are counted.
        """
        self.step_copies_E.zero_()
        self.num_summed.zero_()
        if not self.counts_load:
            return None
        load_E = all_reduce(self.num_copies_E, self.mesh.stage)
        if self.bias_E is not None:
            self.bias_E.copy_(updated_bias(self.bias_E, load_E, self.spec.bias_update_rate))
        busiest = load_E.max() / load_E.mean()
        self.num_copies_E.zero_()  # which is load_E where one rank has the stage
        return busiest
