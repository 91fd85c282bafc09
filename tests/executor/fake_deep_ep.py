"""A stand-in for the package deep_ep: the interfaces of Buffer and HybridEPBuffer, on collectives of any device.

It says nothing about the library's kernels, only whether our adapters speak to it in the right way.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _everyones(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


@dataclass
class _Handle:
    """For each source rank, the tokens that came from it."""

    tokens: list[Tensor]
    num_tokens: int


class Buffer:
    """DeepEP version 1: tokens once to each rank, indices -1 for experts of others."""

    num_sms = 20

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group = group

    @staticmethod
    def set_num_sms(number: int) -> None:
        Buffer.num_sms = number

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Config:
        return _Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, None, Tensor, Tensor, None]:
        assert topk_idx.dtype == torch.int64
        num_ranks = self.group.size()
        rank_of = torch.where(topk_idx < 0, num_ranks, topk_idx // (num_experts // num_ranks))
        is_in_rank = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool).scatter_(1, rank_of, value=True)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return is_in_rank[:, :-1].sum(0), None, per_expert, is_in_rank[:, :-1], None

    def dispatch(
        self,
        x: Tensor,
        *,
        handle: _Handle | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
    ) -> tuple[Any, ...]:
        assert x.is_contiguous()
        me = self.group.rank()
        if handle is not None:
            everyones = _everyones(x.detach(), self.group)
            return torch.cat([part[kept] for part, kept in zip(everyones, handle.tokens, strict=True)]), *[None] * 5
        assert topk_idx is not None
        assert topk_weights is not None
        assert num_tokens_per_expert is not None
        assert is_token_in_rank is not None
        num_local = len(num_tokens_per_expert) // self.group.size()
        shared = (x.detach(), topk_idx, topk_weights.detach(), is_token_in_rank)
        rows, indices, weights, tokens = [], [], [], []
        for their_x, their_index, their_weights, in_rank in _everyones(shared, self.group):
            kept = in_rank[:, me].nonzero()[:, 0]
            local = their_index[kept] - me * num_local
            is_mine = (local >= 0) & (local < num_local) & (their_index[kept] >= 0)
            tokens.append(kept)
            rows.append(their_x[kept])
            indices.append(torch.where(is_mine, local, -1))
            weights.append(their_weights[kept] * is_mine)
        index = torch.cat(indices)
        counts = torch.bincount(index[index >= 0], minlength=num_local).tolist()
        return torch.cat(rows), index, torch.cat(weights), counts, _Handle(tokens, len(x)), None

    def combine(self, x: Tensor, handle: _Handle, topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        assert x.is_contiguous()
        me = self.group.rank()
        sizes = [len(kept) for kept in handle.tokens]
        parts = [None] * len(sizes) if topk_weights is None else list(topk_weights.detach().split(sizes))
        shared = list(zip(handle.tokens, x.detach().split(sizes), parts, strict=True))
        y = x.new_zeros(handle.num_tokens, x.shape[1])
        weights = None if topk_weights is None else x.new_zeros(handle.num_tokens, topk_weights.shape[1])
        for theirs in _everyones(shared, self.group):
            kept, their_x, their_weights = theirs[me]
            y.index_add_(0, kept, their_x)
            if weights is not None:
                weights.index_add_(0, kept, their_weights)
        return y, weights, None


@dataclass
class _Map:
    """Where each row came from: rank, token, expert."""

    rank: Tensor
    token: Tensor
    expert: Tensor
    num_tokens: int
    num_experts: int


class HybridEPBuffer:
    """DeepEP's branch hybrid-ep: rows by expert, sums on the way back."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool,
    ) -> None:
        self.group, self.hidden, self.most = group, hidden_dim, max_num_of_tokens_per_rank

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: None = None,
        num_of_experts_per_rank: int = 0,
        pad_multiple: int | None = None,
        num_permuted_tokens: int | None = None,
        handle: _Map | None = None,
        non_blocking: bool = False,
    ) -> tuple[Any, ...]:
        assert hidden.shape[1] == self.hidden
        assert len(hidden) <= self.most
        if handle is not None:
            everyones = torch.stack(_everyones(hidden.detach(), self.group))
            rows = everyones[handle.rank, handle.token]
            assert num_permuted_tokens == len(rows)
            return rows, None, None, None, handle
        assert routing_map is not None
        assert probs is not None
        shared = _everyones((hidden.detach(), routing_map, probs.detach()), self.group)
        first = self.group.rank() * num_of_experts_per_rank
        routed = torch.stack([routes for _, routes, _ in shared])[:, :, first : first + num_of_experts_per_rank]
        expert, rank, token = routed.permute(2, 0, 1).nonzero().unbind(1)
        rows = torch.stack([x for x, _, _ in shared])[rank, token]
        weights = torch.stack([their for _, _, their in shared])[rank, token, first + expert]
        counts = torch.bincount(expert, minlength=num_of_experts_per_rank)
        return rows, weights, None, counts, _Map(rank, token, first + expert, len(hidden), probs.shape[1])

    def combine_with_unpermute(
        self, *, hidden: Tensor, handle: _Map, probs: Tensor | None = None, pad_multiple: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        y = hidden.new_zeros(handle.num_tokens, hidden.shape[1])
        weights = None if probs is None else probs.new_zeros(handle.num_tokens, handle.num_experts)
        shared = _everyones((handle, hidden.detach(), None if probs is None else probs.detach()), self.group)
        for theirs, rows, row_weights in shared:
            mine = theirs.rank == self.group.rank()
            y.index_add_(0, theirs.token[mine], rows[mine])
            if weights is not None:
                weights.index_put_((theirs.token[mine], theirs.expert[mine]), row_weights[mine], accumulate=True)
        return y, weights
