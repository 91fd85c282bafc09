"""The transformer of a ModelSpec on one rank of a folding.

Shapes: L tokens of this rank, T = B * S tokens of its tp group (B sequences of S, one after the other), H hidden.
Between blocks each rank holds its L = T / tp tokens (sequence parallel), because everything there works by token.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moeplan.executor.attention import build_attention
from moeplan.executor.dtypes import plan_dtypes
from moeplan.executor.linear import embed, vocabulary_range
from moeplan.executor.loss import head_loss
from moeplan.executor.mesh import Mesh
from moeplan.executor.mlp import Mlp
from moeplan.executor.moe import MoeBlock, Router
from moeplan.executor.parameters import ParameterTable, split_piece
from moeplan.executor.recompute import checkpointed, dropping_output
from moeplan.executor.scopes import scope
from moeplan.kernels.norm import rms_norm
from moeplan.plan import Plan


class DecoderLayer(nn.Module):
    """Attention and MLP or experts, each after a norm and added to the residual stream."""

    def __init__(self, plan: Plan, layer: int, mesh: Mesh, table: ParameterTable) -> None:
        super().__init__()
        model, recompute = plan.model, plan.recompute
        self.eps = model.norm_eps
        self.attention_norm = table.add_norm(f"layers.{layer}.attention_norm.weight", model.hidden_size)
        self.attention = build_attention(plan, layer, mesh.tp, table)
        self.mlp_norm = table.add_norm(f"layers.{layer}.mlp_norm.weight", model.hidden_size)
        self.mlp: nn.Module
        if model.layer_kinds[layer] == "moe" and model.moe is not None:
            self.mlp = MoeBlock(plan, model.moe, layer, mesh, table)
            self.recompute_mlp = "moe" in recompute
        else:
            self.mlp = Mlp(model, f"layers.{layer}.mlp", model.dense_ffn_size, mesh.tp, table)
            self.recompute_mlp = "mlp" in recompute
        self.drop_norms = "layernorm" in recompute

    def forward(self, x_LH: Tensor) -> Tensor:
        """This rank's tokens through the layer."""
        x_LH = self._add(x_LH, self._normed(x_LH, self.attention_norm, self.attention, recompute=False))
        return self._add(x_LH, self._normed(x_LH, self.mlp_norm, self.mlp, recompute=self.recompute_mlp))

    def _normed(self, x_LH: Tensor, weight_H: nn.Parameter, block: nn.Module, *, recompute: bool) -> Tensor:
        """``block`` of the norm of x, keeping as much of it as the plan's recompute leaves."""

        def norm(x_LH: Tensor) -> tuple[Tensor]:
            with scope("elementwise"):
                return (rms_norm(x_LH, weight_H, self.eps),)

        def run(normed_LH: Tensor) -> Tensor:
            out_LH: Tensor = checkpointed(block, normed_LH) if recompute else block(normed_LH)
            return out_LH

        if self.drop_norms:
            return dropping_output(norm, (x_LH,), run)
        return run(*norm(x_LH))

    def _add(self, x_LH: Tensor, update_LH: Tensor) -> Tensor:
        with scope("elementwise"):
            return x_LH + update_LH


class Transformer(nn.Module):
    """The whole model of a plan without pipeline; its parameters, in order, are in ``table``."""

    def __init__(self, plan: Plan, mesh: Mesh, seed: int, device: torch.device) -> None:
        super().__init__()
        model = plan.model
        self.table = ParameterTable(device, plan_dtypes(plan).param, seed)
        self.mesh, self.eps, self.recompute_layers = mesh, model.norm_eps, "full" in plan.recompute
        self.first_token, end = vocabulary_range(model.vocab_size, mesh.tp)
        whole, local = (model.vocab_size, model.hidden_size), (end - self.first_token, model.hidden_size)
        self.embedding = self.table.add(split_piece("embedding.weight", whole, 0, mesh.tp), shape=local)
        self.layers = nn.ModuleList(DecoderLayer(plan, layer, mesh, self.table) for layer in range(model.num_layers))
        self.final_norm = self.table.add_norm("final_norm.weight", model.hidden_size)
        self.head = self.embedding
        if not model.tied_embeddings:
            self.head = self.table.add(split_piece("head.weight", whole, 0, mesh.tp), shape=local)

    def forward(self, tokens_T: Tensor, targets_T: Tensor) -> Tensor:
        """Cross entropy summed over the tokens of the tp group, the same on each of its ranks."""
        x_LH = embed(tokens_T, self.embedding, self.first_token, self.mesh.tp)
        for layer in self.layers:
            x_LH = checkpointed(layer, x_LH) if self.recompute_layers else layer(x_LH)
        with scope("elementwise"):
            x_LH = rms_norm(x_LH, self.final_norm, self.eps)
        return head_loss(x_LH, self.head, targets_T, self.first_token, self.mesh.tp).sum()

    def routers(self) -> Iterator[Router]:
        """The router of every MoE layer, in order."""
        for module in self.modules():
            if isinstance(module, Router):
                yield module
