"""The Mixture-of-Experts block: router, dispatch, experts, shared expert.

Shapes: L tokens of this rank, K experts per token, E experts, H hidden, F expert width (of this rank), R rows.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moeplan.executor.dispatch import build_dispatcher
from moeplan.executor.dispatch_options import dispatch_options
from moeplan.executor.echo import Echo, EchoWeights
from moeplan.executor.exchange import Arrived
from moeplan.executor.expert_bias import add_expert_bias
from moeplan.executor.linear import local_linear
from moeplan.executor.mesh import Mesh
from moeplan.executor.mlp import Mlp
from moeplan.executor.offload import offloading
from moeplan.executor.pack_layout import PackLayout
from moeplan.executor.paged_stash import PagedStash
from moeplan.executor.parameters import ParameterTable, residual_std, split_piece, stack_piece
from moeplan.executor.quantized import expert_gemm
from moeplan.executor.quantized_experts import is_fused, quantized_experts, quantized_experts_of_tokens
from moeplan.executor.recompute import checkpointed, dropping_output
from moeplan.executor.routed import Beside, route_tokens
from moeplan.executor.router import Router
from moeplan.executor.scopes import scope
from moeplan.kernels.activation import activation
from moeplan.kernels.permute import permute_probs
from moeplan.kernels.router import Routing
from moeplan.kernels.row_map import RowMap, row_map
from moeplan.model_spec import ModelSpec, Moe
from moeplan.plan import Plan


class Experts(nn.Module):
    """This rank's experts (split over ep), each of this rank's width (split over etp), as two grouped GEMMs."""

    def __init__(self, plan: Plan, moe: Moe, name: str, mesh: Mesh, table: ParameterTable) -> None:
        super().__init__()
        model = plan.model
        self.kind = model.activation
        self.drop_activation = "moe_act" in plan.recompute
        self.stash: PagedStash | None = None  # one for all layers of the rank
        hidden, ffn = model.expert_hidden_size, moe.expert_ffn_size
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
            piece = split_piece(f"{expert}.down.bias", (model.expert_hidden_size,), 0, mesh.etp, std=0.0)
            out_pieces.append(stack_piece(piece, local))
        out_width = model.expert_hidden_size // mesh.etp.size
        self.first_out_bias = mesh.etp.index * out_width
        in_shape, out_shape = (num_local, len(parts) * width), (num_local, out_width)
        self.in_bias_EG = table.add(*in_pieces, shape=in_shape, is_expert=True, is_decayed=False)
        self.out_bias_EH = table.add(*out_pieces, shape=out_shape, is_expert=True, is_decayed=False)

    def forward(
        self,
        rows_RH: Tensor,
        probs_R: Tensor | None,
        offsets_E: Tensor,
        clones: EchoWeights | None = None,
        copied: RowMap | None = None,
    ) -> Tensor:
        """Rows through their experts, or through ``clones``, times ``probs_R`` before the second GEMM where given.

        ``copied`` is as :class:`moeplan.executor.exchange.Arrived` has it.
        """
        with self.stash.holding(len(rows_RH)) if self.stash is not None else nullcontext():
            return self._run(rows_RH, probs_R, offsets_E, clones, copied)

    @property
    def takes_tokens(self) -> bool:
        """Whether :meth:`run_on_tokens` can be asked, which never copies tokens in bf16."""
        return self.in_bias_EG is None and is_fused(self.in_weight_EHF, self.out_weight_EFH, self.kind)

    def run_on_tokens(self, x_LH: Tensor, probs_R: Tensor, rows: RowMap) -> Tensor:
        """y_LH: each token's experts, which ``rows`` sorts its copies by, times ``probs_R``, summed."""
        with self.stash.holding(len(probs_R)) if self.stash is not None else nullcontext():
            weights = (self.in_weight_EHF, self.out_weight_EFH)
            return quantized_experts_of_tokens(x_LH, probs_R, rows, weights, self.kind)

    def _run(
        self,
        rows_RH: Tensor,
        probs_R: Tensor | None,
        offsets_E: Tensor,
        clones: EchoWeights | None,
        copied: RowMap | None,
    ) -> Tensor:
        weights = (self.in_weight_EHF, self.out_weight_EFH) if clones is None else (clones.in_weight, clones.out_weight)
        if self.in_bias_EG is None and is_fused(*weights, self.kind):
            with offloading("expert_fc1", rows_RH, rest="moe_act"):
                return quantized_experts(rows_RH, probs_R, offsets_E, weights, self.kind)
        with scope("expert_gemm"), offloading("expert_fc1", rows_RH):
            hidden_RG = expert_gemm(rows_RH, weights[0], offsets_E, copied)
            if self.in_bias_EG is not None:
                hidden_RG = add_expert_bias(hidden_RG, self.in_bias_EG, offsets_E)

        def project(hidden_RF: Tensor) -> Tensor:
            with scope("expert_gemm"):
                out_RH = expert_gemm(hidden_RF, weights[1], offsets_E)
                if self.out_bias_EH is None:
                    return out_RH
                return add_expert_bias(out_RH, self.out_bias_EH, offsets_E, probs_R, self.first_out_bias)

        with offloading("moe_act", hidden_RG):
            return self._activate(hidden_RG, probs_R, project)

    def _activate(self, hidden_RG: Tensor, probs_R: Tensor | None, project: Callable[[Tensor], Tensor]) -> Tensor:
        """``project`` of the activation of the first matrix's output."""

        def activate(hidden_RG: Tensor) -> tuple[Tensor]:
            with scope("elementwise"):
                return (activation(hidden_RG, self.kind, probs_R),)

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
        self.nowhere = dispatch_options(plan, moe).num_experts  # the index of a dropped copy
        # Nothing travels and nothing is dropped: copies need not exist before they are quantized.
        self.keeps_tokens = mesh.etp_ep.size == 1 and plan.memory_efficient_permutation and plan.routing != "drop"
        self.needs_equal_ranks = plan.dispatcher != "alltoall" and mesh.etp_ep.size > 1
        self.echo = Echo(mesh, moe.num_experts, plan.echo_slots) if plan.echo_slots else None
        self.shared: Mlp | None = None
        self.shared_gate: nn.Parameter | None = None
        if moe.shared_ffn_size:
            self.shared = Mlp(plan.model, f"{name}.shared_expert", moe.shared_ffn_size, mesh.tp, table)
        self.latent_down: nn.Parameter | None = None
        self.latent_up: nn.Parameter | None = None
        if moe.latent_size:
            shape, std = (plan.model.hidden_size, moe.latent_size), residual_std(plan.model.num_layers)
            self.latent_down = table.add_whole(f"{name}.latent_down.weight", shape[::-1])
            self.latent_up = table.add_whole(f"{name}.latent_up.weight", shape, std=std)
        if moe.shared_gate:
            self.shared_gate = table.add_whole(f"{name}.shared_gate.weight", (1, plan.model.hidden_size))

    def forward(self, x_LH: Tensor, layout: PackLayout | None = None) -> Tensor:
        """The block's addition to the residual stream of this rank's tokens."""
        if self.overlap_shared:
            return self._share_beside(x_LH, layout)
        x_LH, routing = self.router(x_LH, layout)
        shared_LH = None
        if self.shared is not None:
            shared_LH = checkpointed(self._share, x_LH) if self.recompute_shared else self._share(x_LH)
        routed_LH = self._route(x_LH, routing, layout)
        if shared_LH is None:
            return routed_LH
        with scope("elementwise"):
            return routed_LH + shared_LH

    def _route(self, x_LH: Tensor, routing: Routing, layout: PackLayout | None, beside: Beside | None = None) -> Tensor:
        if self.latent_down is None or self.latent_up is None:
            return self._run_routed(x_LH, routing, layout, beside)
        latent_LH = self._run_routed(local_linear(x_LH, self.latent_down), routing, layout, beside)
        return local_linear(latent_LH, self.latent_up)

    def _run_routed(self, x_LH: Tensor, routing: Routing, layout: PackLayout | None, beside: Beside | None) -> Tensor:
        """Each token's experts, summed; H is the latent's width where the model has one."""
        if self.keeps_tokens and self.experts.takes_tokens:
            with scope("permute"):
                rows = row_map(routing.expert_index_TK, self.nowhere)
                probs_R = permute_probs(routing.probs_TK, rows)
            return self.experts.run_on_tokens(x_LH, probs_R, rows)
        if self.echo is None:
            return self._exchange(self._run_experts, x_LH, routing, layout, beside)
        echo_plan = self.echo.plan(routing.expert_index_TK)
        routing = replace(routing, expert_index_TK=self.echo.reroute(routing.expert_index_TK, echo_plan))
        weights = (self.experts.in_weight_EHF, self.experts.out_weight_EFH)
        clones = self.echo.fetch(*weights, echo_plan) if echo_plan.clones else None
        return self._exchange(partial(self._run_experts, clones=clones), x_LH, routing, layout, beside)

    def _exchange(
        self,
        run: Callable[[Arrived], Tensor],
        x_LH: Tensor,
        routing: Routing,
        layout: PackLayout | None,
        beside: Beside | None,
    ) -> Tensor:
        """Tokens to their experts and back; with tokens more that go nowhere, where ranks must have equally many."""
        num_rows = layout.num_missing if layout is not None and self.needs_equal_ranks else 0
        if not num_rows:
            return route_tokens(self.dispatcher, run, x_LH, routing, beside)
        rows = (0, 0, 0, num_rows)
        index_LK = F.pad(routing.expert_index_TK, rows, value=self.nowhere)
        routing = replace(routing, probs_TK=F.pad(routing.probs_TK, rows), expert_index_TK=index_LK)
        return route_tokens(self.dispatcher, run, F.pad(x_LH, rows), routing, beside)[: len(x_LH)]

    def _run_experts(self, arrived: Arrived, clones: EchoWeights | None = None) -> Tensor:
        probs_R = arrived.probs if self.probs_before_fc2 else None
        if self.echo is None:
            out_RH: Tensor = self.experts(arrived.rows, probs_R, arrived.offsets, copied=arrived.copied)
            return out_RH
        with offloading("expert_fc1", arrived.rows):
            return self.echo.run(self.experts, arrived.rows, probs_R, arrived.offsets, clones)

    def _share(self, x_LH: Tensor) -> Tensor:
        assert self.shared is not None
        return self._gated(x_LH, self.shared(x_LH))

    def _share_beside(self, x_LH: Tensor, layout: PackLayout | None) -> Tensor:
        """The shared expert's first matrix runs beside the dispatch, its second beside the combine (section 2.6)."""
        shared, made = self.shared, list[Tensor]()
        assert shared is not None
        x_LH, routing = self.router(x_LH, layout)
        beside = Beside(
            dispatch=lambda: made.append(shared.expand(x_LH)),
            combine=lambda: made.append(self._gated(x_LH, shared.project(made.pop()))),
        )
        routed_LH = self._route(x_LH, routing, layout, beside)
        with scope("elementwise"):
            return routed_LH + made.pop()

    def _gated(self, x_LH: Tensor, shared_LH: Tensor) -> Tensor:
        if self.shared_gate is None:
            return shared_LH
        gate_L1 = local_linear(x_LH, self.shared_gate)
        with scope("elementwise"):
            return shared_LH * torch.sigmoid(gate_L1)
