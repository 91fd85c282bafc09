"""Ring attention: keys and values travel round the ranks of cp while each attends to those it has (report section 6).

No rank ever holds the keys of the whole sequence, and a message travels while the block before it is computed. Partial
results are merged by their log-sum-exp; backward sends keys, values and their gradients round once more.

Shapes: B sequences of C positions on this rank (two chunks of each of their documents), N heads and M key-value
heads, D width of a head.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moeplan.executor.attention_block import block_backward, block_forward
from moeplan.executor.dtypes import at_least_fp32
from moeplan.executor.mesh import Group
from moeplan.executor.scopes import scope

# Queries that see keys, and whether causally among each other.
_Part = tuple[slice, slice, bool]


class _Passing:
    """A tensor on its way to the next rank of the ring, and one from the rank before."""

    def __init__(self, sent: Tensor, group: Group) -> None:
        after, before = (group.ranks[(group.index + step) % group.size] for step in (1, -1))
        self._sent, self._received = sent, torch.empty_like(sent)
        process_group = group.process_group
        with scope("cp_comm"):
            self._works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self._sent, after, process_group),
                    dist.P2POp(dist.irecv, self._received, before, process_group),
                ]
            )

    def received(self) -> Tensor:
        """What came, after waiting for both ways."""
        with scope("cp_comm"):
            for work in self._works:
                work.wait()
        return self._received


def _parts(index: int, source: int, lengths: tuple[int, ...]) -> Iterator[_Part]:
    """Which of this rank's queries see which keys of rank ``source``, in documents of ``lengths`` tokens on a rank.

    Rank i holds chunks i and 2 * cp - 1 - i: of a rank before it, all its queries see the first chunk; of one after
    it, only its second chunk sees anything, and that all.
    """
    start = 0
    for length in lengths:
        middle, end = start + length // 2, start + length
        if source == index:
            yield slice(start, end), slice(start, end), True
        elif source < index:
            yield slice(start, end), slice(start, middle), False
        else:
            yield slice(middle, end), slice(start, end), False
        start = end


class _RingAttention(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, q_BNCD: Tensor, k_BMCD: Tensor, v_BMCD: Tensor, sinks_N: Tensor | None, group: Group,
        mask_CC: Tensor | None, lengths: tuple[int, ...],
    ) -> Tensor:  # fmt: skip
        widths = [k_BMCD.shape[3], v_BMCD.shape[3]]
        both = torch.cat([k_BMCD, v_BMCD], 3)
        dtype = at_least_fp32(q_BNCD.dtype)
        # Laid out by position, so that the projection after it reads, and keeps, this very storage.
        out = q_BNCD.new_zeros((*q_BNCD.transpose(1, 2).shape[:3], widths[1]), dtype=dtype).transpose(1, 2)
        lse = q_BNCD.new_full(q_BNCD.shape[:3], -torch.inf, dtype=dtype)
        for step in range(group.size):
            passing = _Passing(both, group) if step < group.size - 1 else None
            for queries, keys, causal in _parts(group.index, (group.index - step) % group.size, lengths):
                k_part, v_part = both[:, :, keys].split(widths, 3)
                with scope("attention"):
                    part_out, part_lse = block_forward(q_BNCD[:, :, queries], k_part, v_part, mask_CC, causal=causal)
                    _merge(out[:, :, queries], lse[:, :, queries], part_out, part_lse)
            if passing is not None:
                both = passing.received()
        if sinks_N is not None:
            _merge(out, lse, torch.zeros_like(out[:, :, :1]), sinks_N.to(dtype)[:, None].expand_as(lse))
        result = out.to(q_BNCD.dtype)
        ctx.group, ctx.mask_CC, ctx.lengths = group, mask_CC, lengths
        ctx.save_for_backward(q_BNCD, k_BMCD, v_BMCD, result, lse, sinks_N)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BNCD, k_BMCD, v_BMCD, out_BNCD, lse_BNC, sinks_N = ctx.saved_tensors
        group, widths = ctx.group, [k_BMCD.shape[3], v_BMCD.shape[3]]
        both = torch.cat([k_BMCD, v_BMCD], 3)
        grad_q = torch.zeros_like(q_BNCD, dtype=lse_BNC.dtype)
        grad_both = torch.zeros_like(both, dtype=lse_BNC.dtype)
        for step in range(group.size):
            passing = _Passing(both, group) if step < group.size - 1 else None
            for queries, keys, causal in _parts(group.index, (group.index - step) % group.size, ctx.lengths):
                k_part, v_part = both[:, :, keys].split(widths, 3)
                with scope("attention"):
                    part_q, part_k, part_v = block_backward(
                        grads[0][:, :, queries],
                        (q_BNCD[:, :, queries], k_part, v_part),
                        out_BNCD[:, :, queries],
                        lse_BNC[:, :, queries],
                        ctx.mask_CC,
                        causal=causal,
                    )
                    grad_q[:, :, queries] += part_q
                    grad_both[:, :, keys] += torch.cat([part_k, part_v], 3)
            if group.size > 1:  # gradients follow their keys, and after the last block come home
                grad_both = _Passing(grad_both, group).received()
            if passing is not None:
                both = passing.received()
        grad_k, grad_v = grad_both.to(k_BMCD.dtype).split(widths, 3)
        grad_sinks_N = None
        if sinks_N is not None:
            # A sink of probability p and value 0: its score's gradient is -p times that of the output along itself.
            along_BNC = torch.linalg.vecdot(grads[0].to(lse_BNC.dtype), out_BNCD.to(lse_BNC.dtype))
            grad_sinks_N = -((sinks_N[:, None] - lse_BNC).exp() * along_BNC).sum((0, 2)).to(sinks_N.dtype)
        return grad_q.to(q_BNCD.dtype), grad_k, grad_v, grad_sinks_N, None, None, None


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Take a further block of keys into attention over those before it, in place."""
    merged = torch.logaddexp(lse, part_lse)
    out.mul_((lse - merged).exp()[..., None]).add_(part_out * (part_lse - merged).exp()[..., None])
    lse.copy_(merged)


class RingAttention:
    """Causal attention of this rank's queries to the keys and values of all ranks.

    Alone it is attention that keeps no scores, for widths and devices where torch has no such kernel. ``mask_CC``
    (true: seen) then narrows it to a window, where no flash kernel runs. ``documents``: lengths of those that fill the
    sequence of all ranks, none seeing another; empty for one.
    """

    def __init__(self, group: Group, mask_CC: Tensor | None = None, documents: tuple[int, ...] = ()) -> None:
        self.group, self.mask_CC = group, mask_CC
        self.lengths = tuple(length // group.size for length in documents)

    def __call__(self, q_BCND: Tensor, k_BCMD: Tensor, v_BCMD: Tensor, sinks_N: Tensor | None = None) -> Tensor:
        """out_BCND."""
        inputs = (x.transpose(1, 2) for x in (q_BCND, k_BCMD, v_BCMD))
        lengths = self.lengths or (q_BCND.shape[1],)
        out_BNCD = _RingAttention.apply(*inputs, sinks_N, self.group, self.mask_CC, lengths)
        return cast("Tensor", out_BNCD).transpose(1, 2)
