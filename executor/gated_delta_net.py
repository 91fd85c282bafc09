"""The gated delta net (arXiv 2412.06464) with its heads split over tensor-parallel ranks, as Qwen3-Next has it.

Queries, keys, values, an output gate and two scalars a value head come from one projection; a short convolution and
SiLU, the gated delta rule, a norm of each head, the gate. Shapes: L tokens of this rank, T = B * C tokens of the tp
group (C of each of B sequences), S positions of a sequence, O columns of the projection, V value heads of this rank
that are E wide.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.executor.context import HeadExchange
from moeplan.executor.dtypes import at_least_fp32
from moeplan.executor.linear_mixer import LinearMixerBase, Place, fresh_taps
from moeplan.executor.mesh import Mesh
from moeplan.executor.parameters import ParameterTable, split_piece
from moeplan.executor.recompute import checkpointed
from moeplan.executor.scopes import scope
from moeplan.kernels.causal_conv import causal_conv
from moeplan.kernels.delta_rule import gated_delta_rule
from moeplan.kernels.delta_rule_reference import DeltaTokens
from moeplan.kernels.gated_norm import gated_norm
from moeplan.mixers import GatedDeltaNet
from moeplan.plan import Plan

# A head's state decays by exp(-A softplus(x)) a token: A is drawn from here (transformers, Qwen3-Next's _init_weights).
_DECAYS = (0.01, 16.0)
_MIXED = ("query", "key", "value")  # what the convolution takes


def fresh_log_decay(uniform: Tensor) -> Tensor:
    """Logarithms of decays from uniform draws."""
    return uniform.mul(_DECAYS[1] - _DECAYS[0]).add_(_DECAYS[0]).log_()


class GatedDeltaNetMixer(LinearMixerBase):
    """The mixer of one layer."""

    def __init__(self, plan: Plan, layer: int, mesh: Mesh, table: ParameterTable, spec: GatedDeltaNet) -> None:
        super().__init__(plan, layer, mesh, table, spec.inner_size)
        self.spec, self.eps = spec, plan.model.norm_eps
        hidden, tp, heads = plan.model.hidden_size, self.group.size, spec.num_v_heads
        keys, values = spec.num_k_heads * spec.k_head_dim, spec.inner_size
        whole = {"query": keys, "key": keys, "value": values, "gate": values, "beta": heads, "time_step": heads}
        rows, taps, start = [], [], 0
        for part, width in whole.items():
            name = f"{self.name}.{part}"
            rows.append(split_piece(f"{name}.weight", (width, hidden), 0, self.group, start=start))
            if part in _MIXED:
                shape = (width, spec.conv_kernel)
                taps.append(
                    split_piece(f"{name}_conv.weight", shape, 0, self.group, start=start, of_uniform=fresh_taps)
                )
            start += width // tp
        self.widths = [width // tp for width in whole.values()]
        self.in_weight = table.add(*rows, shape=(start, hidden))
        self.conv_weight = table.add(*taps, shape=(spec.conv_size // tp, spec.conv_kernel))
        bias = split_piece(f"{self.name}.time_step.bias", (heads,), 0, self.group, std=0.0, fill=1.0)
        decay = split_piece(f"{self.name}.log_decay", (heads,), 0, self.group, of_uniform=fresh_log_decay)
        self.time_bias = table.add(bias, shape=(heads // tp,), is_decayed=False)
        self.log_decay = table.add(decay, shape=(heads // tp,), is_decayed=False)
        self.norm = table.add_norm(f"{self.name}.norm.weight", spec.v_head_dim)

    def mix_exchanged(self, place: Place, exchange: HeadExchange, projected_BCO: Tensor) -> Tensor:
        """out_BCI. Everything goes to the ranks of its heads: norm and gate are a head's own."""
        parts = [x.unflatten(2, (place.head_ranks, -1)) for x in projected_BCO.split(self.widths, 2)]
        out_BSI = checkpointed(partial(self.mix, place), exchange.to_heads(torch.cat(parts, 3)))
        return exchange.to_tokens(out_BSI).flatten(2)

    def mix(self, place: Place, projected_BSO: Tensor) -> Tensor:
        """Gated and normed outputs of those heads whose projections of all tokens are here, side by side."""
        spec, dtype = self.spec, at_least_fp32(projected_BSO.dtype)
        query, key, value, gate, beta, time = (width // place.head_ranks for width in self.widths)
        mixed, gate_BSI, beta_BSV, time_BSV = projected_BSO.split([query + key + value, gate, beta, time], 2)
        conv_CK = torch.cat([self._own(x_CK, place) for x_CK in self.conv_weight.split(self.widths[:3])])
        with scope("elementwise"):
            mixed = causal_conv(mixed, conv_CK, None, place.documents)
            decay_V, bias_V = self._own(self.log_decay, place).to(dtype).exp(), self._own(self.time_bias, place)
            log_decay_BSV = -decay_V * F.softplus(time_BSV.to(dtype) + bias_V.to(dtype))
        widths = (spec.k_head_dim, spec.k_head_dim, spec.v_head_dim)
        parts = zip(mixed.split([query, key, value], 2), widths, strict=True)
        q_BSKD, k_BSKD, v_BSVE = (x.unflatten(2, (-1, width)) for x, width in parts)
        with scope("attention"):
            tokens = DeltaTokens(q_BSKD, k_BSKD, v_BSVE, log_decay_BSV, beta_BSV.sigmoid())
            out_BSVE = gated_delta_rule(tokens, place.documents, chunk_size=spec.chunk_size)
        with scope("elementwise"):
            gate_BSVE = gate_BSI.unflatten(2, (-1, spec.v_head_dim))
            return gated_norm(out_BSVE, gate_BSVE, self.norm, self.eps, gate_first=False).flatten(2)

    @staticmethod
    def _own(x: Tensor, place: Place) -> Tensor:
        """The part of this tp rank's heads that runs on this rank of cp."""
        return x.chunk(place.head_ranks)[place.head_rank]
