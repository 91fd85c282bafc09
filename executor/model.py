"""The transformer of a ModelSpec on one rank of a folding: the pipeline stages that the rank holds.

Shapes: L tokens of this rank, T = B * S / cp tokens of its tp group (its chunks of B sequences), H hidden, P hidden
states of the prediction depths known so far. Between blocks each rank holds its L = T / tp tokens (sequence parallel).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from moeplan.executor.decoder_layer import DecoderLayer
from moeplan.executor.dtypes import plan_dtypes
from moeplan.executor.linear import embed
from moeplan.executor.loss import head_loss
from moeplan.executor.mesh import Group, Mesh
from moeplan.executor.micro_batch import NO_TARGET, MicroBatch, cut_micro_batch, loss_weights
from moeplan.executor.moe import Experts
from moeplan.executor.mtp import MtpLayer
from moeplan.executor.offload import Offloader, offloading
from moeplan.executor.paged_stash import build_stash
from moeplan.executor.parameters import ParameterTable, WeightSource, split_piece, split_range
from moeplan.executor.precision import quantize_matrices
from moeplan.executor.recompute import checkpointed
from moeplan.executor.router import Router
from moeplan.executor.scopes import scope
from moeplan.kernels.norm import rms_norm
from moeplan.layout import Stage
from moeplan.plan import Plan


def embedding_holders(plan: Plan) -> tuple[int, ...]:
    """Pipeline ranks with a copy of the embedding: for the model, for MTP, and as head where tied."""
    return tuple(sorted({index % plan.pp for index, stage in enumerate(plan.pipeline.stages) if _embeds(plan, stage)}))


def _embeds(plan: Plan, stage: Stage) -> bool:
    return stage.has_embedding or stage.num_mtp > 0 or (stage.has_loss and plan.model.tied_embeddings)


class Embedding(nn.Module):
    """Looks tokens up in this rank's rows of the embedding, from token id ``first_token`` on."""

    def __init__(self, weight: nn.Parameter, first_token: int, group: Group) -> None:
        super().__init__()
        self.weight, self.first_token, self.group = weight, first_token, group

    def forward(self, tokens_T: Tensor) -> Tensor:
        """x_LH of this rank's tokens."""
        return embed(tokens_T, self.weight, self.first_token, self.group)


class HeadLoss(nn.Module):
    """Cross entropy by this rank's rows of the head, from token id ``first_token`` on."""

    def __init__(self, weight: nn.Parameter, first_token: int, group: Group) -> None:
        super().__init__()
        self.weight, self.first_token, self.group = weight, first_token, group

    def forward(self, x_LH: Tensor, targets_T: Tensor) -> Tensor:
        """loss_T of the group's tokens."""
        return head_loss(x_LH, self.weight, targets_T, self.first_token, self.group)


class ModelStage(nn.Module):
    """One virtual stage: any of embedding, decoder layers, MTP layers, loss.

    The final norm follows the last decoder layer where the model has MTP, which reads its output; else it belongs to
    the loss.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        mesh: Mesh,
        table: ParameterTable,
        *,
        embedding: nn.Parameter | None,
        head: nn.Parameter | None,
    ) -> None:
        super().__init__()
        model, stages = plan.model, plan.pipeline.stages
        self.stage, self.mesh, self.eps = stages[index], mesh, model.norm_eps
        self.recompute_layers = "full" in plan.recompute
        first_token = split_range(model.vocab_size, mesh.tp)[0]
        self.embed = None if embedding is None else Embedding(embedding, first_token, mesh.tp)
        self.head_loss = HeadLoss(head, first_token, mesh.tp) if head is not None and self.stage.has_loss else None
        self.offloader: Offloader | None = None
        self.first_layer = sum(one.num_layers + one.num_mtp for one in stages[index % plan.pp : index : plan.pp])
        self.layers = nn.ModuleList(DecoderLayer(plan, layer, mesh, table) for layer in self.stage.layers)
        ends_decoder = self.stage.num_layers > 0 and self.stage.layers.stop == model.num_layers
        has_norm = ends_decoder if model.num_mtp_layers else self.stage.has_loss
        self.final_norm = table.add_norm("final_norm.weight", model.hidden_size) if has_norm else None
        self.first_depth = 1 + sum(stage.num_mtp for stage in stages[:index])  # hidden states that arrive here
        # One module a depth, or one that all depths run.
        first_mtp, num_mtp = model.num_layers + self.first_depth - 1, self.stage.num_mtp
        if model.mtp_shared:
            first_mtp, num_mtp = model.num_layers, min(num_mtp, 1)
        self.mtp = nn.ModuleList(MtpLayer(plan, layer, mesh, table) for layer in range(first_mtp, first_mtp + num_mtp))

    def forward(self, batch: MicroBatch, received_PLH: Tensor | None) -> Tensor:
        """Hidden states for the stage after this, or the loss [P] of each depth summed over the tp group's tokens."""
        hidden = self.hidden_states(batch, received_PLH)
        if not self.stage.has_loss:
            return torch.stack(hidden) if len(hidden) > 1 else hidden[0][None]
        has_gaps = batch.layout is not None
        return torch.stack(
            [
                self._loss(x_LH, batch.targets[depth], has_gaps=has_gaps or depth > 0)
                for depth, x_LH in enumerate(hidden)
            ]
        )

    def hidden_states(self, batch: MicroBatch, received_PLH: Tensor | None) -> list[Tensor]:
        """Hidden states [L, H] of each depth after this stage's layers and norms."""
        hidden = [self._embed(batch.tokens[0])] if received_PLH is None else list(received_PLH.unbind())
        with self.offloader.chunk() if self.offloader is not None else nullcontext():
            for index, layer in enumerate(self.layers, self.first_layer):
                run = partial(self.decoder_layer, partial(layer, layout=batch.layout))
                hidden[0] = self.run_layer(index, run, hidden[0])
            if self.final_norm is not None:
                with scope("elementwise"):
                    hidden[0] = rms_norm(hidden[0], self.final_norm, self.eps)
            for number in range(self.stage.num_mtp):
                layer, depth = self.mtp[number % len(self.mtp)], self.first_depth + number
                run = partial(layer, self._embed(batch.tokens[depth]), layout=batch.layout)
                hidden.append(self.run_layer(self.first_layer + self.stage.num_layers + number, run, hidden[-1]))
        return hidden

    def run_layer(self, index: int, run: Callable[[Tensor], Tensor], x_LH: Tensor) -> Tensor:
        """Layer ``index`` of this rank, sending to the host what the plan offloads."""
        return run(x_LH) if self.offloader is None else self.offloader.run_layer(index, run, x_LH)

    def decoder_layer(self, layer: Callable[[Tensor], Tensor], x_LH: Tensor) -> Tensor:
        """``layer`` of x, run again whole in backward under full recompute."""
        if not self.recompute_layers:
            return layer(x_LH)
        with offloading("attn_norm", x_LH):
            return checkpointed(layer, x_LH)

    def _embed(self, tokens_T: Tensor) -> Tensor:
        assert self.embed is not None
        x_LH: Tensor = self.embed(tokens_T)
        return x_LH

    def _loss(self, x_LH: Tensor, targets_T: Tensor, *, has_gaps: bool) -> Tensor:
        """Summed over the tokens, under ``has_gaps`` over those with a target."""
        assert self.head_loss is not None
        loss_T: Tensor = self.head_loss(x_LH, targets_T)
        with scope("loss"):
            return (loss_T * (targets_T != NO_TARGET)).sum() if has_gaps else loss_T.sum()


class Transformer(nn.Module):
    """The virtual stages of one pipeline rank, in order; its parameters, in order, are in ``table``.

    First values come from ``weights``, or are drawn by ``seed``.
    """

    def __init__(
        self, plan: Plan, mesh: Mesh, seed: int, device: torch.device, weights: WeightSource | None = None
    ) -> None:
        super().__init__()
        model, rank = plan.model, mesh.pp.index
        self.plan, self.mesh = plan, mesh
        self.table = ParameterTable(device, plan_dtypes(plan).param, seed, plan.sharding == "full", weights)
        first_token, end = split_range(model.vocab_size, mesh.tp)
        whole, local = (model.vocab_size, model.hidden_size), (end - first_token, model.hidden_size)
        holders = embedding_holders(plan)
        self.embedding: nn.Parameter | None = None
        if rank in holders:
            piece = split_piece("embedding.weight", whole, 0, mesh.tp)
            self.embedding = self.table.add(piece, shape=local, is_shared=len(holders) > 1)
        self.head: nn.Parameter | None = None
        if any(stage.has_loss for stage in plan.pipeline.stages_of_rank(plan.pp, rank)):
            self.head = self.embedding
            if not model.tied_embeddings:
                self.head = self.table.add(split_piece("head.weight", whole, 0, mesh.tp), shape=local)
        self.stages = nn.ModuleList(
            ModelStage(plan, index, mesh, self.table, embedding=self.embedding, head=self.head)
            for index in range(rank, plan.pp * plan.vp, plan.pp)
        )
        quantize_matrices(plan, self)
        stash = build_stash(plan, rank, device)
        for module in self.modules():
            if isinstance(module, Experts):
                module.stash = stash
        if plan.offload_layers or plan.offload_modules:
            offloader = Offloader(plan, self, len(self.layers), device)
            for stage in cast("Iterable[ModelStage]", self.stages):
                stage.offloader = offloader

    def forward(self, tokens_T: Tensor, targets_T: Tensor) -> Tensor:
        """Loss of all depths summed over the tokens, where one rank holds the whole model."""
        batch = cut_micro_batch(tokens_T, targets_T, self.plan, self.mesh.cp)
        (whole,) = self.stages
        losses_P: Tensor = whole(batch, None)
        weights_P = losses_P.new_tensor(loss_weights(self.plan)) * self.plan.tokens_per_step
        return (losses_P * weights_P).sum()

    def logits(self, tokens_T: Tensor) -> Tensor:
        """Logits [T, vocabulary] of the token after each, where one rank holds the whole model."""
        (whole,) = self.stages
        assert isinstance(whole, ModelStage)
        assert whole.head_loss is not None
        hidden = whole.hidden_states(cut_micro_batch(tokens_T, tokens_T, self.plan, self.mesh.cp), None)
        logits_TV: Tensor = hidden[0] @ whole.head_loss.weight.t()
        return logits_TV

    @property
    def layers(self) -> list[DecoderLayer]:
        """Decoder layers of this rank, in order, with those inside MTP layers."""
        return [module for module in self.modules() if isinstance(module, DecoderLayer)]

    def routers(self) -> Iterator[Router]:
        """The router of every MoE layer of this rank, in order."""
        for module in self.modules():
            if isinstance(module, Router):
                yield module
