"""Parameters that know which part of which whole tensor they hold, so that every folding starts from one model.

Each whole tensor is drawn from a generator seeded by (seed, its name) and then cut: what a rank holds does not
depend on how many ranks there are.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from moeplan.executor.mesh import Group

# Standard deviation of fresh weights; what writes to the residual stream is scaled down by sqrt(2 x layers).
INIT_STD = 0.02


@dataclass(frozen=True)
class Piece:
    """The part ``source`` of the whole tensor ``name`` of ``shape``, lying at ``target`` in a local parameter.

    Fresh values are ``fill`` plus ``std`` times a standard normal draw, or ``of_uniform`` of draws from 0 to 1.
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]
    std: float = INIT_STD
    fill: float = 0.0
    of_uniform: Callable[[Tensor], Tensor] | None = None


def whole_piece(name: str, shape: tuple[int, ...], *, std: float = INIT_STD, fill: float = 0.0) -> Piece:
    """A tensor that every rank holds in full."""
    everything = tuple(slice(0, size) for size in shape)
    return Piece(name, shape, everything, everything, std, fill)


def split_range(size: int, group: Group) -> tuple[int, int]:
    """Where this rank's part of ``size`` rows begins, and one past its end; parts differ by one where it must be."""
    return size * group.index // group.size, size * (group.index + 1) // group.size


def split_piece(
    name: str,
    shape: tuple[int, ...],
    dim: int,
    group: Group,
    *,
    start: int = 0,
    std: float = INIT_STD,
    fill: float = 0.0,
    of_uniform: Callable[[Tensor], Tensor] | None = None,
) -> Piece:
    """A tensor split over ``group`` along ``dim``; the local part lies from ``start`` along that dimension."""
    first, end = split_range(shape[dim], group)
    source, target = ([slice(0, size) for size in shape] for _ in range(2))
    source[dim] = slice(first, end)
    target[dim] = slice(start, start + end - first)
    return Piece(name, shape, tuple(source), tuple(target), std, fill, of_uniform)


def stack_piece(piece: Piece, index: int) -> Piece:
    """The same piece as item ``index`` of a stacked parameter with one more leading dimension."""
    return replace(piece, target=(slice(index, index + 1), *piece.target))


def residual_std(num_layers: int) -> float:
    """Deviation of a matrix whose output is added to the residual stream twice a layer."""
    return INIT_STD / math.sqrt(2 * num_layers)


# Gives the part of a whole weight that a piece is, of any dtype, on any device.
WeightSource = Callable[[Piece], Tensor]


@dataclass(frozen=True)
class Entry:
    """A parameter of this rank. ``is_replicated``: each rank of tp (dense) holds it and a part of its gradient.

    ``is_shared``: other pipeline ranks hold it as well, each with the gradient of its own use.
    """

    parameter: nn.Parameter
    pieces: tuple[Piece, ...]
    is_expert: bool
    is_replicated: bool
    is_decayed: bool
    is_shared: bool = False
    first_values: WeightSource | None = None

    def fill(self, values: Tensor) -> None:
        """Write the parameter's first values: its own, or where it has no storage yet, those of ``first_values``."""
        if self.first_values is None:
            values.copy_(self.parameter.detach())
        else:
            _fill(values, self.pieces, self.first_values)


@dataclass
class ParameterTable:
    """Makes the parameters of one rank and lists them in order of creation.

    First values come from ``weights``, or are drawn. ``is_deferred``: parameters get no storage, and their values when
    they are given one, so that a rank that keeps parts of them (full sharding) never holds them all.
    """

    device: torch.device
    dtype: torch.dtype
    seed: int
    is_deferred: bool = False
    weights: WeightSource | None = None
    entries: list[Entry] = field(default_factory=list)

    def add(
        self,
        *pieces: Piece,
        shape: tuple[int, ...],
        is_expert: bool = False,
        is_replicated: bool = False,
        is_decayed: bool = True,
        is_shared: bool = False,
    ) -> nn.Parameter:
        """A new parameter of ``shape`` (of this rank) filled from its pieces."""
        local = torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.is_deferred:
            local.untyped_storage().resize_(0)
        else:
            _fill(local, pieces, self._first_values)
        parameter = nn.Parameter(local)
        later = self._first_values if self.is_deferred else None
        self.entries.append(Entry(parameter, pieces, is_expert, is_replicated, is_decayed, is_shared, later))
        return parameter

    def _first_values(self, piece: Piece) -> Tensor:
        return drawn(piece, self.seed, self.device) if self.weights is None else self.weights(piece)

    def add_whole(
        self, name: str, shape: tuple[int, ...], *, std: float = INIT_STD, fill: float = 0.0, is_decayed: bool = True
    ) -> nn.Parameter:
        """A dense parameter that every rank of tp holds in full."""
        piece = whole_piece(name, shape, std=std, fill=fill)
        return self.add(piece, shape=shape, is_replicated=True, is_decayed=is_decayed)

    def add_norm(self, name: str, width: int) -> nn.Parameter:
        """The weight of a norm: ones."""
        return self.add_whole(name, (width,), std=0.0, fill=1.0, is_decayed=False)


def _fill(values: Tensor, pieces: tuple[Piece, ...], first_values: WeightSource) -> None:
    values.zero_()
    for piece in pieces:
        values[piece.target] = first_values(piece).to(values)


def drawn(piece: Piece, seed: int, device: torch.device) -> Tensor:
    """The piece's part of a freshly drawn weight, in fp32."""
    return _draw(piece, seed, device)[piece.source]


def _draw(piece: Piece, seed: int, device: torch.device) -> Tensor:
    """The whole tensor in fp32, the same on every rank of one kind of device."""
    if piece.std == 0 and piece.of_uniform is None:
        return torch.full(piece.shape, piece.fill, device=device)
    digest = hashlib.sha256(f"{seed}/{piece.name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
    if piece.of_uniform is not None:
        return piece.of_uniform(torch.rand(piece.shape, generator=generator, device=device))
    return torch.randn(piece.shape, generator=generator, device=device).mul_(piece.std).add_(piece.fill)
