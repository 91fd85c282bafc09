"""The router: which experts a token goes to, and the losses and biases that balance them (report section 7).

Shapes: L tokens of this rank, K experts per token, E experts, H hidden, S sets of tokens that are balanced apart.
"""

import torch
from torch import Tensor, nn

from moeplan.executor.balance import TokenSets, count_real, pack_sets, sets_balance_loss
from moeplan.executor.collectives import all_reduce
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
    attach_loss,
    balance_loss,
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

    def forward(self, x_LH: Tensor, layout: PackLayout | None = None) -> Routing:
        """Probabilities and indices of the chosen experts; padding of a ``layout`` is not counted."""
        with scope("router"):
            logits_LE = router_logits(x_LH, self.weight)
            if self.logit_bias is not None:
                logits_LE = logits_LE + self.logit_bias.to(logits_LE.dtype)
            routing = self._route(logits_LE)
            # Where gradients are off, this is validation, or the first of two runs under recompute.
            if self.counts_load and torch.is_grad_enabled():
                self.num_copies_E += self._count(routing.expert_index_TK, layout)
            probs_LK = self._with_losses(routing, logits_LE, layout)
            index_LK = routing.expert_index_TK
            if self.capacity is not None:
                policy = self.spec.drop_policy
                index_LK = within_capacity(index_LK, probs_LK, self.moe.num_experts, self.capacity, policy)
        return Routing(probs_LK, index_LK, routing.share_TE)

    def _route(self, logits_LE: Tensor) -> Routing:
        """The routing of a micro-batch, before any copy is dropped."""
        control = self.control
        if control is None or not control.is_active:
            return route(logits_LE, self.options, self.bias_E)
        micro_batch = control.next_call(self.name)
        forced_LK = control.forced(self.name, micro_batch, logits_LE, self.options)
        routing = route(logits_LE, self.options, self.bias_E, forced_LK)
        control.note(self.name, micro_batch, routing.expert_index_TK)
        return routing

    def _with_losses(self, routing: Routing, logits_LE: Tensor, layout: PackLayout | None) -> Tensor:
        probs_LK, spec = routing.probs_TK, self.spec
        if spec.aux_loss == "global_aux_loss" and spec.aux_loss_coeff > 0:
            probs_LK = attach_loss(probs_LK, self._step_balance_loss(routing))
        elif spec.aux_loss != "none" and spec.aux_loss_coeff > 0:
            loss = sets_balance_loss(routing, self.moe, self._token_sets(layout), self.num_step_tokens)
            probs_LK = attach_loss(probs_LK, loss)
        if spec.z_loss_coeff > 0:
            is_real_L = layout.is_real_L if layout is not None else None
            loss = z_loss(logits_LE, spec.z_loss_coeff, self.num_step_tokens, is_real_L)
            probs_LK = attach_loss(probs_LK, loss)
        return probs_LK

    def _token_sets(self, layout: PackLayout | None) -> TokenSets:
        """All tokens of the micro-batch, or sequence by sequence, or document by document."""
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

    def _count(self, index_LK: Tensor, layout: PackLayout | None) -> Tensor:
        """Copies [E] of this rank's tokens by expert."""
        if layout is None:
            return count_tokens(index_LK, self.moe.num_experts)[0]
        return count_real(index_LK, self.moe.num_experts, layout)

    def _step_balance_loss(self, routing: Routing) -> Tensor:
        """This rank's part of the loss of its micro-batch against the load of the step so far, on all ranks of dp.

        As Megatron-LM has it (its global_aux_loss): the loads of later micro-batches are not known yet, so the figures
        depend on how many there are.
        """
        num_copies_E = all_reduce(count_tokens(routing.expert_index_TK, self.moe.num_experts), self.mesh.stage)[0]
        if torch.is_grad_enabled():  # see forward
            self.step_copies_E += num_copies_E
            self.num_summed += 1
        num_copies = self.mesh.dp.size * self.seq_len * self.num_sequences * self.moe.top_k  # of each micro-batch
        fraction_E = self.step_copies_E / (self.num_summed.clamp(min=1) * num_copies)
        share_1E = routing.share_TE.sum(0, keepdim=True)
        return balance_loss(share_1E, fraction_E[None], self.num_step_tokens, self.spec.aux_loss_coeff)

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
