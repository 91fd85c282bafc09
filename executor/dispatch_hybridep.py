"""Dispatcher ``flex``, back end ``hybridep``: the kernels of DeepEP's branch hybrid-ep (its HybridEPBuffer).

The library is imported when a layer is built. It takes a map of tokens to experts, returns rows sorted by expert, and
sums on the way back; this module only speaks its interface. Not yet run against the library itself: tests hold it to a
stand-in on collectives.

Shapes: L tokens of this rank, K experts per token, D experts of the library: E times etp, R rows at this rank's.
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
from moeplan.executor.mesh import Mesh
from moeplan.executor.scopes import scope


@lru_cache(maxsize=4)
def _buffer(group: dist.ProcessGroup, hidden: int, num_tokens: int, num_local: int, num_sms: int) -> Any:
    """The library's communication buffer, one for all layers. Collective over the group when it is first asked for."""
    sms = {"num_sms_dispatch_api": num_sms, "num_sms_combine_api": num_sms} if num_sms else {}
    return deep_ep("HybridEPBuffer")(
        group=group,
        hidden_dim=hidden,
        max_num_of_tokens_per_rank=num_tokens,
        num_local_experts=num_local,
        use_fp8=False,
        **sms,
    )


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x_LH: Tensor, probs_LD: Tensor, exchange: "HybridEpExchange") -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        with scope("dispatch"):
            return exchange.dispatch(x_LH, probs_LD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        exchange, (grad_RH, grad_R) = ctx.exchange, grads
        with scope("dispatch"):
            grad_LH, grad_LD = exchange.buffer.combine_with_unpermute(
                hidden=grad_RH.contiguous(), probs=grad_R.contiguous(), handle=exchange.handle, pad_multiple=None
            )
        return grad_LH, grad_LD, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, exchange: "HybridEpExchange") -> Tensor:
        ctx.exchange, ctx.num_rows = exchange, len(rows_RH)
        with scope("dispatch"):
            y_LH, _ = exchange.buffer.combine_with_unpermute(
                hidden=rows_RH.contiguous(), handle=exchange.handle, pad_multiple=None
            )
        return cast("Tensor", y_LH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        with scope("dispatch"):
            grad_RH, *_ = exchange.buffer.dispatch_with_permute(
                hidden=grads[0].contiguous(),
                scaling_factor=None,
                handle=exchange.handle,
                pad_multiple=None,
                num_permuted_tokens=ctx.num_rows,
            )
        return grad_RH, None


@dataclass
class HybridEpExchange:
    """One forward of one layer; see :class:`moeplan.executor.exchange.Exchange`. Sending makes handle and offsets."""

    buffer: Any
    options: DispatchOptions
    num_local: int
    is_routed: Tensor  # [L, D]
    handle: Any = None
    offsets: Tensor | None = None

    def dispatch(self, x_LH: Tensor, probs_LD: Tensor) -> tuple[Tensor, Tensor]:
        """Rows by expert and their probabilities; the host waits for their number."""
        rows_RH, probs_R, _, num_rows_E, self.handle = self.buffer.dispatch_with_permute(
            hidden=x_LH.contiguous(),
            routing_map=self.is_routed,
            probs=probs_LD.contiguous(),
            scaling_factor=None,
            num_of_experts_per_rank=self.num_local,
            pad_multiple=None,
            num_permuted_tokens=None,
            non_blocking=False,
        )
        self.offsets = num_rows_E.cumsum(0).to(device=x_LH.device, dtype=torch.int32)
        return rows_RH, probs_R

    def send(self, packed: Tensors) -> Tensors:
        """Rows by expert and their probabilities."""
        return cast("Tensors", _Dispatch.apply(*packed, self))

    def arrange(self, arrived: Tensors) -> Arrived:
        """What arrived: it lies by expert."""
        rows_RH, probs_R = arrived
        assert self.offsets is not None
        return Arrived(rows_RH, probs_R, self.offsets)

    def collect(self, rows_RH: Tensor, probs_R: Tensor | None) -> Tensor:
        """Rows, weighed here unless the experts did."""
        if self.options.probs_before_fc2:
            return rows_RH
        assert probs_R is not None
        with scope("permute"):
            return rows_RH * probs_R.to(rows_RH.dtype)[:, None]

    def send_back(self, rows: Tensor) -> Tensor:
        """y_LH: sums over experts, made on the way."""
        return cast("Tensor", _Combine.apply(rows, self))

    def unpack(self, rows: Tensor, probs_LK: Tensor) -> Tensor:
        """y_LH, which the way back has summed."""
        return rows


class HybridEpDispatcher:
    """See the module. InvalidInputError where the library is missing. Padding to a capacity is left to its rows."""

    def __init__(self, options: DispatchOptions, mesh: Mesh) -> None:
        self.options, self.mesh = options, mesh
        deep_ep("HybridEPBuffer")

    def pack(self, x_LH: Tensor, expert_index_LK: Tensor, probs_LK: Tensor) -> tuple[Tensors, HybridEpExchange]:
        """Tokens as they are, and probabilities over all experts; each rank of etp counts as having its own."""
        mesh, num_experts = self.mesh, self.options.num_experts
        num_local, index_LK = num_experts // mesh.ep.size, expert_index_LK.long()
        with scope("permute"):
            # One more column takes dropped copies.
            empty_LE = probs_LK.new_zeros(len(x_LH), num_experts + 1)
            probs_LE = empty_LE.scatter(1, index_LK, probs_LK)[:, :-1]
            is_routed_LE = empty_LE.bool().scatter(1, index_LK, value=True)[:, :-1]
            # Experts of the library lie rank by rank, and etp is fastest among the ranks.
            probs_LD, is_routed_LD = (
                over_experts.unflatten(1, (-1, 1, num_local)).expand(-1, -1, mesh.etp.size, -1).flatten(1)
                for over_experts in (probs_LE, is_routed_LE)
            )
        group = mesh.etp_ep.process_group
        assert group is not None
        buffer = _buffer(group, x_LH.shape[1], len(x_LH), num_local, self.options.num_sms)
        return (x_LH, probs_LD), HybridEpExchange(buffer, self.options, num_local, is_routed_LD)
