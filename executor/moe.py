"""The Mixture-of-Experts block: router, dispatch, experts, shared expert.

Shapes: L tokens of this rank, K experts per token, E experts, H hidden, F expert width (of this rank), R rows.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from moeplan.executor.collectives import all_reduce
from moeplan.executor.dispatch import build_dispatcher
from moeplan.executor.dtypes import at_least_fp32
from moeplan.executor.echo import Echo, EchoWeights
from moeplan.executor.exchange import Arrived
from moeplan.executor.expert_bias import add_expert_bias
from moeplan.executor.linear import local_linear
from moeplan.executor.mesh import Mesh
from moeplan.executor.mlp import Mlp
from moeplan.executor.offload import offloading
from moeplan.executor.parameters import ParameterTable, residual_std, split_piece, stack_piece, whole_piece
from moeplan.executor.quantized import expert_gemm
from moeplan.executor.quantized_experts import is_fused, quantized_experts
from moeplan.executor.recompute import checkpointed, dropping_output
from moeplan.executor.routed import Beside, route_tokens
from moeplan.executor.routing import RoutingControl
from moeplan.executor.scopes import scope
from moeplan.kernels.activation import activation
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
from moeplan.model_spec import ModelSpec, Moe
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
        # A balancing loss counts once a micro-batch, as a mean over all micro-batches of the step.
        self.loss_scale = 1 / (plan.num_micro_batches * plan.dp)
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
        # Copies of the step's micro-batches so far, over all ranks of the stage, for the balancing loss of the batch.
        self.step_copies_E, self.num_summed = zeros.clone(), 0
        # Load is counted, recorded and balanced before copies are dropped.
        self.capacity: int | None = None
        if plan.routing == "drop":
            self.capacity = expert_capacity(
                plan.tokens_per_rank, moe.top_k, moe.num_experts, moe.router.capacity_factor
            )
        self.control: RoutingControl | None = None

    def forward(self, x_LH: Tensor) -> Routing:
        """Probabilities and indices of the chosen experts."""
        with scope("router"):
            logits_LE = router_logits(x_LH, self.weight)
            if self.logit_bias is not None:
                logits_LE = logits_LE + self.logit_bias.to(logits_LE.dtype)
            routing = self._route(logits_LE)
            # Where gradients are off, this is validation, or the first of two runs under recompute.
            if self.bias_E is not None and torch.is_grad_enabled():
                self.num_copies_E += count_tokens(routing.expert_index_TK, self.moe.num_experts)[0]
            probs_LK = self._with_losses(routing, logits_LE)
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

    def _with_losses(self, routing: Routing, logits_LE: Tensor) -> Tensor:
        probs_LK = routing.probs_TK
        if self.spec.aux_loss != "none" and self.spec.aux_loss_coeff > 0:
            is_global = self.spec.aux_loss == "global_aux_loss"
            loss = self._step_balance_loss(routing) if is_global else self._balance_loss(routing)
            probs_LK = attach_loss(probs_LK, loss, self.loss_scale)
        if self.spec.z_loss_coeff > 0:
            loss = z_loss(logits_LE, self.spec.z_loss_coeff)
            probs_LK = attach_loss(probs_LK, loss, self.loss_scale / self.mesh.tp_cp.size)
        return probs_LK

    def _balance_loss(self, routing: Routing) -> Tensor:
        """This rank's part of the loss of its micro-batch: over all its tokens, or sequence by sequence."""
        num_experts, group = self.moe.num_experts, self.mesh.tp_cp
        per_sequence = self.spec.aux_loss == "seq_aux_loss"
        num_sets = self.num_sequences if per_sequence else 1
        set_tokens = self.seq_len if per_sequence else self.seq_len * self.num_sequences
        if num_sets == 1:
            num_copies_SE = count_tokens(routing.expert_index_TK, num_experts)
            share_SE = routing.share_TE.sum(0, keepdim=True)
        else:
            # Each rank of cp has an equal part of every sequence, and tp splits those parts one after the other.
            first = self.mesh.tp.index * self.num_tokens
            positions_L = torch.arange(first, first + self.num_tokens, device=routing.share_TE.device)
            set_L = positions_L // (set_tokens // self.mesh.cp.size)
            index_LK = routing.expert_index_TK + set_L[:, None] * num_experts
            num_copies_SE = count_tokens(index_LK, num_sets * num_experts).view(num_sets, num_experts)
            share_SE = routing.share_TE.new_zeros(num_sets, num_experts).index_add(0, set_L, routing.share_TE)
        num_copies_SE = all_reduce(num_copies_SE, group)
        return balance_loss(share_SE, num_copies_SE, set_tokens, self.moe.top_k, self.spec.aux_loss_coeff)

    def _step_balance_loss(self, routing: Routing) -> Tensor:
        """This rank's part of the loss of its micro-batch against the load of the step so far, on all ranks of dp.

        As Megatron-LM has it (its global_aux_loss): the loads of later micro-batches are not known yet, so the figures
        depend on how many there are.
        """
        num_copies_E = all_reduce(count_tokens(routing.expert_index_TK, self.moe.num_experts), self.mesh.stage)[0]
        if torch.is_grad_enabled():  # see forward
            self.step_copies_E += num_copies_E
            self.num_summed += 1
        mean_E = self.step_copies_E / (max(self.num_summed, 1) * self.mesh.dp.size)
        share_1E = routing.share_TE.sum(0, keepdim=True)
        num_tokens = self.seq_len * self.num_sequences
        return balance_loss(share_1E, mean_E[None], num_tokens, self.moe.top_k, self.spec.aux_loss_coeff)

    @torch.no_grad()
    def end_step(self) -> None:
        """One step of aux-free balancing from the loads of the whole batch. Collective over the stage."""
        self.step_copies_E.zero_()
        self.num_summed = 0
        if self.bias_E is not None:
            load_E = all_reduce(self.num_copies_E, self.mesh.stage)
            self.bias_E.copy_(updated_bias(self.bias_E, load_E, self.spec.bias_update_rate))
            self.num_copies_E.zero_()


class Experts(nn.Module):
    """This rank's experts (split over ep), each of this rank's width (split over etp), as two grouped GEMMs."""

    def __init__(self, plan: Plan, moe: Moe, name: str, mesh: Mesh, table: ParameterTable) -> None:
        super().__init__()
        model = plan.model
        self.kind = model.activation
        self.drop_activation = "moe_act" in plan.recompute
        hidden, ffn = model.hidden_size, moe.expert_ffn_size
        width, num_local = ffn // mesh.etp.size, moe.num_experts // mesh.ep.size
        parts = ("gate", "up") if model.is_gated else ("up",)
        in_pieces, out_pieces = [], []
        for local in range(num_local):
            expert = f"{name}.{mesh.ep.index * num_local + local}"
            for index, part in enumerate(parts):
                piece = split_piece(f"{expert}.{part}.weight", (hidden, ffn), 1, mesh.etp, start=index * width)
                in_pieces.append(stack_piece(piece, local))
            std = residual_std(model.num_layers)
            piece = split_piece(f"{expert}.down.weight", (ffn, hidden), 0, mesh.etp, std=std)
            out_pieces.append(stack_piece(piece, local))
        in_shape, out_shape = (num_local, hidden, len(parts) * width), (num_local, width, hidden)
        self.in_weight_EHF = table.add(*in_pieces, shape=in_shape, is_expert=True)
        self.out_weight_EFH = table.add(*out_pieces, shape=out_shape, is_expert=True)
        self.in_bias_EG: nn.Parameter | None = None
        self.out_bias_EH: nn.Parameter | None = None
        if moe.mlp_bias:
            self._add_biases(model, moe, name, table, mesh)

    def _add_biases(self, model: ModelSpec, moe: Moe, name: str, table: ParameterTable, mesh: Mesh) -> None:
        """Biases of both matrices; each rank of etp adds its part of the second's, as their outputs are summed."""
        width, num_local = moe.expert_ffn_size // mesh.etp.size, moe.num_experts // mesh.ep.size
        parts = ("gate", "up") if model.is_gated else ("up",)
        in_pieces, out_pieces = [], []
        for local in range(num_local):
            expert = f"{name}.{mesh.ep.index * num_local + local}"
            for index, part in enumerate(parts):
                shape, start = (moe.expert_ffn_size,), index * width
                piece = split_piece(f"{expert}.{part}.bias", shape, 0, mesh.etp, start=start, std=0.0)
                in_pieces.append(stack_piece(piece, local))
            piece = split_piece(f"{expert}.down.bias", (model.hidden_size,), 0, mesh.etp, std=0.0)
            out_pieces.append(stack_piece(piece, local))
        out_width = model.hidden_size // mesh.etp.size
        self.first_out_bias = mesh.etp.index * out_width
        in_shape, out_shape = (num_local, len(parts) * width), (num_local, out_width)
        self.in_bias_EG = table.add(*in_pieces, shape=in_shape, is_expert=True, is_decayed=False)
        self.out_bias_EH = table.add(*out_pieces, shape=out_shape, is_expert=True, is_decayed=False)

    def forward(
        self, rows_RH: Tensor, probs_R: Tensor | None, offsets_E: Tensor, clones: EchoWeights | None = None
    ) -> Tensor:
        """Rows through their experts, or through ``clones``, times ``probs_R`` before the second GEMM where given."""
        weights = (self.in_weight_EHF, self.out_weight_EFH) if clones is None else (clones.in_weight, clones.out_weight)
        if self.in_bias_EG is None and is_fused(*weights, self.kind):
            with offloading("expert_fc1", rows_RH, rest="moe_act"):
                return quantized_experts(rows_RH, probs_R, offsets_E, *weights, self.kind)
        with scope("expert_gemm"), offloading("expert_fc1", rows_RH):
            hidden_RG = expert_gemm(rows_RH, weights[0], offsets_E)
            if self.in_bias_EG is not None:
                hidden_RG = add_expert_bias(hidden_RG, self.in_bias_EG, offsets_E)

        def activate(hidden_RG: Tensor) -> tuple[Tensor]:
            with scope("elementwise"):
                return (activation(hidden_RG, self.kind, probs_R),)

        def project(hidden_RF: Tensor) -> Tensor:
            with scope("expert_gemm"):
                out_RH = expert_gemm(hidden_RF, weights[1], offsets_E)
                if self.out_bias_EH is None:
                    return out_RH
                return add_expert_bias(out_RH, self.out_bias_EH, offsets_E, probs_R, self.first_out_bias)

        with offloading("moe_act", hidden_RG):
            if self.drop_activation:
                return dropping_output(activate, (hidden_RG,), project)
            return project(*activate(hidden_RG))


class MoeBlock(nn.Module):
    """A layer's experts: routed, and shared where the model has them."""

    def __init__(self, plan: Plan, moe: Moe, layer: int, mesh: Mesh, table: ParameterTable) -> None:
        super().__init__()
        name = f"layers.{layer}"
        self.probs_before_fc2 = plan.memory_efficient_permutation
        self.recompute_shared = "shared_experts" in plan.recompute
        self.overlap_shared = plan.shared_expert_overlap and mesh.etp_ep.size > 1
        self.router = Router(plan, moe, f"{name}.router", mesh, table)
        self.dispatcher = build_dispatcher(plan, moe, mesh)
        self.experts = Experts(plan, moe, f"{name}.experts", mesh, table)
        self.echo = Echo(mesh, moe.num_experts, plan.echo_slots) if plan.echo_slots else None
        self.shared: Mlp | None = None
        self.shared_gate: nn.Parameter | None = None
        if moe.shared_ffn_size:
            self.shared = Mlp(plan.model, f"{name}.shared_expert", moe.shared_ffn_size, mesh.tp, table)
        if moe.shared_gate:
            self.shared_gate = table.add_whole(f"{name}.shared_gate.weight", (1, plan.model.hidden_size))

    def forward(self, x_LH: Tensor) -> Tensor:
        """The block's addition to the residual stream of this rank's tokens."""
        if self.overlap_shared:
            return self._share_beside(x_LH)
        shared_LH = None
        if self.shared is not None:
            shared_LH = checkpointed(self._share, x_LH) if self.recompute_shared else self._share(x_LH)
        routed_LH = self._route(x_LH)
        if shared_LH is None:
            return routed_LH
        with scope("elementwise"):
            return routed_LH + shared_LH

    def _route(self, x_LH: Tensor, beside: Beside | None = None) -> Tensor:
        routing: Routing = self.router(x_LH)
        if self.echo is None:
            return route_tokens(self.dispatcher, self._run_experts, x_LH, routing, beside)
        echo_plan = self.echo.plan(routing.expert_index_TK)
        routing = replace(routing, expert_index_TK=self.echo.reroute(routing.expert_index_TK, echo_plan))
        weights = (self.experts.in_weight_EHF, self.experts.out_weight_EFH)
        clones = self.echo.fetch(*weights, echo_plan) if echo_plan.clones else None
        return route_tokens(self.dispatcher, partial(self._run_experts, clones=clones), x_LH, routing, beside)

    def _run_experts(self, arrived: Arrived, clones: EchoWeights | None = None) -> Tensor:
        probs_R = arrived.probs if self.probs_before_fc2 else None
        if self.echo is None:
            out_RH: Tensor = self.experts(arrived.rows, probs_R, arrived.offsets)
            return out_RH
        with offloading("expert_fc1", arrived.rows):
            return self.echo.run(self.experts, arrived.rows, probs_R, arrived.offsets, clones)

    def _share(self, x_LH: Tensor) -> Tensor:
        assert self.shared is not None
        return self._gated(x_LH, self.shared(x_LH))

    def _share_beside(self, x_LH: Tensor) -> Tensor:
        """The shared expert's first matrix runs beside the dispatch, its second beside the combine (section 2.6)."""
        shared, made = self.shared, list[Tensor]()
        assert shared is not None
        beside = Beside(
            dispatch=lambda: made.append(shared.expand(x_LH)),
            combine=lambda: made.append(self._gated(x_LH, shared.project(made.pop()))),
        )
        routed_LH = self._route(x_LH, beside)
        with scope("elementwise"):
            return routed_LH + made.pop()

    def _gated(self, x_LH: Tensor, shared_LH: Tensor) -> Tensor:
        if self.shared_gate is None:
            return shared_LH
        gate_L1 = local_linear(x_LH, self.shared_gate)
        with scope("elementwise"):
            return shared_LH * torch.sigmoid(gate_L1)
