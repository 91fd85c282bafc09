"""Dispatcher ``flex``, back end ``deepep``: the kernels of deepseek-ai/DeepEP (its Buffer, version 1).

The library is imported when a layer is built. What it does is that of :mod:`moeplan.executor.dispatch_flex`; this
module only speaks its interface. Not yet run against the library itself: tests hold it to a stand-in on collectives.

Shapes: L tokens of this rank, A tokens that arrived, K experts per token (times etp: each rank of etp gets a copy).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moeplan.executor.dispatch_options import DispatchOptions
from moeplan.executor.exchange import Arrived, Tensors
from moeplan.executor.libraries import deep_ep
from moeplan.executor.local_rows import LocalRows, local_row_map
from moeplan.executor.mesh import Mesh
from moeplan.executor.scopes import scope

# The kernels take bf16 tokens; for a narrower type the library wants room as for two bytes an element.
_LEAST_ELEMENT_BYTES = 2


@lru_cache(maxsize=4)
def _buffer(group: dist.ProcessGroup, row_bytes: int, num_sms: int) -> Any:
    """The library's communication buffer, one for all layers. Collective over the group when it is first asked for."""
    library, num_ranks = deep_ep("Buffer"), group.size()
    if num_sms:
        library.set_num_sms(num_sms)
    configs = (library.get_dispatch_config(num_ranks), library.get_combine_config(num_ranks))
    nvlink_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in configs)
    network_bytes = max(config.get_rdma_buffer_size_hint(row_bytes, num_ranks) for config in configs)
    return library(group, nvlink_bytes, network_bytes)


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x_LH: Tensor, probs_LK: Tensor, exchange: "DeepEpExchange") -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        with scope("dispatch"):
            return exchange.dispatch(x_LH, probs_LK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        exchange, (grad_AH, grad_AK) = ctx.exchange, grads
        with scope("dispatch"):
            grad_LH, grad_LK, _ = exchange.buffer(grad_AH).combine(
                grad_AH.contiguous(), exchange.handle, topk_weights=grad_AK.contiguous()
            )
        return grad_LH, grad_LK, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, rows_AH: Tensor, exchange: "DeepEpExchange") -> Tensor:
        ctx.exchange = exchange
        with scope("dispatch"):
            y_LH, _, _ = exchange.buffer(rows_AH).combine(rows_AH.contiguous(), exchange.handle)
        return cast("Tensor", y_LH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        with scope("dispatch"):
            grad_AH = exchange.buffer(grads[0]).dispatch(grads[0].contiguous(), handle=exchange.handle)[0]
        return grad_AH, None


@dataclass
class DeepEpExchange:
    """One forward of one layer; see :class:`moeplan.executor.exchange.Exchange`. Sending makes handle and rows."""

    options: DispatchOptions
    mesh: Mesh
    index: Tensor  # [L, K] of the library's experts
    handle: Any = None
    local: LocalRows | None = None

    def buffer(self, x: Tensor) -> Any:
        """The buffer for rows such as those of x."""
        row_bytes = x.shape[1] * max(x.element_size(), _LEAST_ELEMENT_BYTES)
        group = self.mesh.etp_ep.process_group
        assert group is not None
        return _buffer(group, row_bytes, self.options.num_sms)

    def dispatch(self, x_LH: Tensor, probs_LK: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [A, H] and their probabilities [A, K], zero for experts of other ranks."""
        options, mesh, buffer = self.options, self.mesh, self.buffer(x_LH)
        per_rank, per_host, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            self.index, options.num_experts * mesh.etp.size
        )
        x_AH, index_AK, probs_AK, num_rows, self.handle, _ = buffer.dispatch(
            x_LH.contiguous(),
            topk_idx=self.index,
            topk_weights=probs_LK.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        num_local = options.num_experts // mesh.ep.size
        local_AK = torch.where(index_AK < 0, num_local, index_AK)
        capacity = options.padded_capacity(len(x_LH), mesh.etp_ep.size)
        rows = local_row_map(local_AK, num_local, capacity, sum(num_rows))
        self.local = LocalRows(rows, options.probs_before_fc2)
        return x_AH, probs_AK

    def send(self, packed: Tensors) -> Tensors:
        """Tokens and probabilities at every rank that has an expert of theirs."""
        return cast("Tensors", _Dispatch.apply(*packed, self))

    def arrange(self, arrived: Tensors) -> Arrived:
        """Rows by expert."""
        assert self.local is not None
        return self.local.arrange(arrived)

    def collect(self, rows_RH: Tensor, probs_R: Tensor | None) -> Tensor:
        """Sums over this rank's experts."""
        assert self.local is not None
        return self.local.collect(rows_RH, probs_R)

    def send_back(self, rows: Tensor) -> Tensor:
        """y_LH: sums over ranks, made on the way."""
        return cast("Tensor", _Combine.apply(rows, self))

    def unpack(self, rows: Tensor, probs_LK: Tensor) -> Tensor:
        """y_LH, which the way back has summed."""
        return rows


class DeepEpDispatcher:
    """See the module. InvalidInputError where the library is missing."""

    def __init__(self, options: DispatchOptions, mesh: Mesh) -> None:
        self.options, self.mesh = options, mesh
        deep_ep("Buffer")

    def pack(self, x_LH: Tensor, expert_index_LK: Tensor, probs_LK: Tensor) -> tuple[Tensors, DeepEpExchange]:
        """Tokens and probabilities as they are; each rank of etp counts as having experts of its own."""
        etp, num_local = self.mesh.etp.size, self.options.num_experts // self.mesh.ep.size
        index_LK, is_dropped_LK = expert_index_LK.long(), expert_index_LK >= self.options.num_experts
        # Experts of the library lie rank by rank, and etp is fastest among the ranks.
        first_LK = index_LK // num_local * (etp * num_local) + index_LK % num_local
        copies = [(first_LK + shard * num_local).masked_fill(is_dropped_LK, -1) for shard in range(etp)]
        return (x_LH, probs_LK.repeat(1, etp)), DeepEpExchange(self.options, self.mesh, torch.cat(copies, 1))
