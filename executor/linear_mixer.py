"""Linear mixers: recurrences along the sequence, heads split over tensor-parallel ranks as attention's are.

A state runs through the whole sequence, so that under context parallelism ranks exchange tokens for heads.

Shapes: L tokens of this rank, T = B * C tokens of the tp group (C of each of B sequences), S positions of a sequence,
O columns of the input projection, I channels of this rank's heads.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moeplan.executor.context import Documents, HeadExchange, head_exchange
from moeplan.executor.linear import column_linear, row_linear
from moeplan.executor.mesh import Group, Mesh
from moeplan.executor.offload import offloading
from moeplan.executor.pack_layout import PackLayout
from moeplan.executor.parameters import ParameterTable, residual_std, split_piece
from moeplan.executor.recompute import checkpointed
from moeplan.plan import Plan


class Place(NamedTuple):
    """Where tokens lie: ``seq_len`` of each sequence on this rank, documents of the whole, and how ranks exchange them.

    ``exchange``: None where this rank holds whole sequences.
    """

    seq_len: int
    documents: Documents
    exchange: HeadExchange | None

    @property
    def head_ranks(self) -> int:
        """Ranks that heads are split over beside tp."""
        return 1 if self.exchange is None else self.exchange.group.size

    @property
    def head_rank(self) -> int:
        """Which part of the heads this rank runs."""
        return 0 if self.exchange is None else self.exchange.group.index


class LinearMixerBase(nn.Module, ABC):
    """Where tokens lie, and both projections: what all linear mixers share. Weights are named ``name``.*.

    Kept for backward: what comes in, the input projection, of which the rest is made again, and what goes out.
    """

    in_weight: nn.Parameter

    def __init__(self, plan: Plan, layer: int, mesh: Mesh, table: ParameterTable, inner_size: int) -> None:
        super().__init__()
        hidden, self.group = plan.model.hidden_size, mesh.tp
        self.name = f"layers.{layer}.mixer"
        self.plan_place = None if plan.dynamic_cp else place_of(plan.documents, mesh.cp, table.device)
        std = residual_std(plan.model.num_layers)
        piece = split_piece(f"{self.name}.output.weight", (hidden, inner_size), 1, self.group, std=std)
        self.out_weight = table.add(piece, shape=(hidden, inner_size // self.group.size))

    def place(self, layout: PackLayout | None) -> Place:
        """That of the plan's sequences, or of a pack."""
        if layout is None:
            assert self.plan_place is not None
            return self.plan_place
        return layout.keep("linear_mixer", partial(place_of, layout.documents, layout.group, layout.device))

    def forward(self, x_LH: Tensor, layout: PackLayout | None = None) -> Tensor:
        """The mixer's addition to the residual stream of this rank's tokens."""
        place = self.place(layout)
        with offloading("qkv_linear", x_LH):
            projected_TO = column_linear(x_LH, self.in_weight, None, self.group)
        projected_BCO = projected_TO.view(-1, place.seq_len, projected_TO.shape[1])
        if place.exchange is None:
            out_BCI = checkpointed(partial(self.mix, place), projected_BCO)
        else:
            out_BCI = self.mix_exchanged(place, place.exchange, projected_BCO)
        return row_linear(out_BCI.flatten(0, 1), self.out_weight, None, self.group)

    @abstractmethod
    def mix(self, place: Place, projected_BSO: Tensor) -> Tensor:
        """What goes to the output projection, out_BSI, where whole sequences are here."""

    @abstractmethod
    def mix_exchanged(self, place: Place, exchange: HeadExchange, projected_BCO: Tensor) -> Tensor:
        """The same of this rank's tokens, out_BCI, where ranks exchange tokens for heads."""


def place_of(documents: Documents, group: Group, device: torch.device) -> Place:
    """Of documents that ``group`` shares."""
    exchange = head_exchange(documents, group, device) if group.size > 1 else None
    return Place(sum(documents) // group.size, documents, exchange)


def fresh_taps(uniform_CK: Tensor) -> Tensor:
    """First weights of a convolution from uniform draws, as torch's have them: up to 1 / sqrt(taps) either way."""
    return uniform_CK.mul_(2).sub_(1).mul_(uniform_CK.shape[1] ** -0.5)
