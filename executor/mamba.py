"""Mamba-2 (arXiv 2405.21060): a short convolution, a recurrence whose state decays by head, and a gated norm.

Shapes: L tokens of this rank, T = B * C tokens of the tp group (C of each of B sequences), S positions of a sequence,
R ranks of cp, I inner channels of this rank, M channels with time steps of what the recurrence mixes.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moeplan.executor.context import HeadExchange
from moeplan.executor.dtypes import at_least_fp32
from moeplan.executor.linear_mixer import LinearMixerBase, Place, fresh_taps
from moeplan.executor.mesh import Mesh
from moeplan.executor.parameters import ParameterTable, split_piece
from moeplan.executor.recompute import checkpointed
from moeplan.executor.scopes import scope
from moeplan.kernels.causal_conv import causal_conv
from moeplan.kernels.gated_norm import gated_norm
from moeplan.kernels.ssd import ssd
from moeplan.kernels.ssd_reference import SsdHeads, SsdTokens
from moeplan.mixers import Mamba2
from moeplan.plan import Plan

# A head's state decays by exp(-rate dt) a token: first rates are uniform in the first range, and the log of dt without
# an input in that of the second (mamba_ssm/modules/mamba2.py).
_RATES, _TIME_STEPS = (1.0, 16.0), (1e-3, 0.1)


def fresh_log_rate(uniform: Tensor) -> Tensor:
    """Logarithms of rates from uniform draws."""
    return uniform.mul(_RATES[1] - _RATES[0]).add_(_RATES[0]).log_()


def fresh_time_bias(uniform: Tensor) -> Tensor:
    """Biases that softplus turns into time steps, from uniform draws."""
    low, high = map(math.log, _TIME_STEPS)
    step = uniform.mul(high - low).add_(low).exp_()
    return step + torch.log(-torch.expm1(-step))


def fresh_conv_bias(num_taps: int, uniform: Tensor) -> Tensor:
    """From uniform draws, as torch's convolutions have them: up to 1 / sqrt(taps) either way."""
    return uniform.mul(2).sub_(1).mul_(num_taps**-0.5)


class _Part(NamedTuple):
    """Heads and groups of the whole that a rank runs, from the first of each on (of this rank's share over tp)."""

    first_head: int
    num_heads: int
    first_group: int
    num_groups: int


class Mamba(LinearMixerBase):
    """Heads and groups split over tp, and under context parallelism over its ranks while the recurrence runs.

    Values, keys and queries are what the papers call x, B and C.
    """

    def __init__(self, plan: Plan, layer: int, mesh: Mesh, table: ParameterTable, mixer: Mamba2) -> None:
        super().__init__(plan, layer, mesh, table, mixer.inner_size)
        tp, hidden = self.group.size, plan.model.hidden_size
        self.mixer, self.eps, self.inner = mixer, plan.model.norm_eps, mixer.inner_size // tp
        self.num_heads, self.num_groups = mixer.num_heads // tp, mixer.num_groups // tp
        shared = mixer.num_groups * mixer.state_size
        mixed = {"value": mixer.inner_size, "key": shared, "query": shared}
        pieces, start = [], 0
        for part, width in {"gate": mixer.inner_size, **mixed, "time_step": mixer.num_heads}.items():
            pieces.append(split_piece(f"{self.name}.{part}.weight", (width, hidden), 0, self.group, start=start))
            start += width // tp
        self.in_weight = table.add(*pieces, shape=(start, hidden))
        self.conv_weight, self.conv_bias = self._convolution(table, mixed)
        self.time_bias = self._of_heads(table, "time_step.bias", of_uniform=fresh_time_bias)
        self.log_rate = self._of_heads(table, "log_rate", of_uniform=fresh_log_rate)
        self.skip = self._of_heads(table, "skip", std=0.0, fill=1.0)
        norm = split_piece(f"{self.name}.norm.weight", (mixer.inner_size,), 0, self.group, std=0.0, fill=1.0)
        self.norm_weight = table.add(norm, shape=(self.inner,), is_decayed=False)

    def _convolution(self, table: ParameterTable, mixed: dict[str, int]) -> tuple[nn.Parameter, nn.Parameter]:
        """Taps and biases of all channels that are mixed, so many of each part."""
        weights, biases, start, num_taps = [], [], 0, self.mixer.conv_kernel
        fresh = partial(fresh_conv_bias, num_taps)
        for part, width in mixed.items():
            name, shape = f"{self.name}.{part}_conv", (width, num_taps)
            weights.append(split_piece(f"{name}.weight", shape, 0, self.group, start=start, of_uniform=fresh_taps))
            biases.append(split_piece(f"{name}.bias", (width,), 0, self.group, start=start, of_uniform=fresh))
            start += width // self.group.size
        return table.add(*weights, shape=(start, num_taps)), table.add(*biases, shape=(start,), is_decayed=False)

    def _of_heads(self, table: ParameterTable, name: str, **fresh: Any) -> nn.Parameter:
        """A number a head."""
        piece = split_piece(f"{self.name}.{name}", (self.mixer.num_heads,), 0, self.group, **fresh)
        return table.add(piece, shape=(self.num_heads,), is_decayed=False)

    def mix(self, place: Place, projected_BSO: Tensor) -> Tensor:
        """out_BSI, where whole sequences are here."""
        gate_BSI, mixed_BSM = projected_BSO.split([self.inner, projected_BSO.shape[2] - self.inner], 2)
        return self._gated_norm(self._recur(place, mixed_BSM), gate_BSI)

    def mix_exchanged(self, place: Place, exchange: HeadExchange, projected_BCO: Tensor) -> Tensor:
        """out_BCI. The gate stays where its tokens are, and so does the norm: ranks may share a group."""
        gate_BCI, mixed_BCM = projected_BCO.split([self.inner, projected_BCO.shape[2] - self.inner], 2)
        mixed_BSM = exchange.to_heads(self._for_ranks(mixed_BCM, place.head_ranks))
        out_BCI = exchange.to_tokens(checkpointed(partial(self._recur, place), mixed_BSM)).flatten(2)
        # A copy, as a view would keep what the exchange has sent away.
        return checkpointed(self._gated_norm, out_BCI, gate_BCI.contiguous())

    def _for_ranks(self, mixed_BCM: Tensor, num_ranks: int) -> Tensor:
        """What each rank needs [B, C, R, ...]: its heads, and keys and queries of each group that it runs a part of."""
        parts = []
        copies = max(1, num_ranks // self.num_groups)
        shared = self.num_groups * self.mixer.state_size
        value, key, query, step = mixed_BCM.split([self.inner, shared, shared, self.num_heads], 2)
        for part, number in ((value, 1), (key, copies), (query, copies), (step, 1)):
            part_BCR = part.unflatten(2, (num_ranks // number, -1))
            parts.append(part_BCR.repeat_interleave(number, 2) if number > 1 else part_BCR)
        return torch.cat(parts, 3)

    def _part(self, place: Place) -> _Part:
        ranks, rank = place.head_ranks, place.head_rank
        heads, groups = self.num_heads // ranks, max(1, self.num_groups // ranks)
        return _Part(rank * heads, heads, rank * self.num_groups // ranks, groups)

    def _recur(self, place: Place, mixed_BSM: Tensor) -> Tensor:
        """out_BSI of this rank's heads: convolution, time steps and recurrence, with what heads let through."""
        part, mixer = self._part(place), self.mixer
        inner, shared = part.num_heads * mixer.head_dim, part.num_groups * mixer.state_size
        conv_BSW, step_BSN = mixed_BSM.split([inner + 2 * shared, part.num_heads], 2)
        heads = slice(part.first_head, part.first_head + part.num_heads)
        with scope("elementwise"):
            conv_BSW = causal_conv(conv_BSW, *self._conv_weights(part), place.documents)
            # Numbers of heads are rounded to the type of weights once a step, and what is made of them is not.
            dtype = at_least_fp32(step_BSN.dtype)
            step_BSN = F.softplus(step_BSN.to(dtype) + self.time_bias[heads].to(dtype))
            of_heads = SsdHeads(-self.log_rate[heads].to(dtype).exp(), self.skip[heads].to(dtype))
        value, key, query = conv_BSW.split([inner, shared, shared], 2)
        tokens = SsdTokens(
            value.unflatten(2, (part.num_heads, -1)),
            step_BSN,
            key.unflatten(2, (part.num_groups, -1)),
            query.unflatten(2, (part.num_groups, -1)),
        )
        with scope("attention"):
            out_BSNP: Tensor = ssd(tokens, of_heads, place.documents, chunk_size=mixer.chunk_size)
            return out_BSNP.flatten(2)

    def _conv_weights(self, part: _Part) -> tuple[Tensor, Tensor]:
        """Of the channels of a part of the heads."""
        if part.num_heads == self.num_heads:
            return self.conv_weight, self.conv_bias
        width, size = self.mixer.head_dim, self.mixer.state_size
        keys, queries = self.inner, self.inner + self.num_groups * size
        ranges = (
            (part.first_head * width, part.num_heads * width),
            (keys + part.first_group * size, part.num_groups * size),
            (queries + part.first_group * size, part.num_groups * size),
        )
        weight, bias = (
            torch.cat([whole[first : first + number] for first, number in ranges])
            for whole in (self.conv_weight, self.conv_bias)
        )
        return weight, bias

    def _gated_norm(self, out_BCI: Tensor, gate_BCI: Tensor) -> Tensor:
        """RMS norm of out times SiLU of the gate, each group of heads by itself."""
        with scope("elementwise"):
            out_BCGW, gate_BCGW = (x.unflatten(2, (self.num_groups, -1)) for x in (out_BCI, gate_BCI))
            weight_GW = self.norm_weight.view(self.num_groups, -1)
            return gated_norm(out_BCGW, gate_BCGW, weight_GW, self.eps, gate_first=True).flatten(2)
