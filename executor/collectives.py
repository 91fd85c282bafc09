"""Collectives with gradients, along the first dimension of a tensor. A group of one rank returns its input.

Tensor parallel with sequence parallel: gather_rows before a column-parallel matrix, scatter_rows after a row-parallel
one, each the other's gradient. Context parallel: gather_rows of keys and values. Experts: exchange_rows over ep,
gather_uneven_rows and scatter_uneven_rows over etp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moeplan.executor.mesh import Group
from moeplan.executor.scopes import scope
from moeplan.vocabulary import OpFamily

ValueT = TypeVar("ValueT")

# torch 2.13 renames these two and warns of the old names; 2.11 and 2.12 have only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum over the group, in place; no gradient."""
    if group.size > 1:
        dist.all_reduce(x, group=group.process_group)
    return x


def all_reduced(x: Tensor, group: Group) -> Tensor:
    """:func:`all_reduce` that leaves x as it was; x itself where the group has one rank."""
    return all_reduce(x.clone(), group) if group.size > 1 else x


def all_gather_into(whole: Tensor, part: Tensor, group: Group) -> None:
    """Fill ``whole`` with the parts of every rank, in rank order. Groups of more than one."""
    _all_gather(whole, part, group=group.process_group)


def all_gather_raw(x: Tensor, group: Group) -> Tensor:
    """Rows of every rank, in rank order; no gradient. All ranks bring equally many."""
    if group.size == 1:
        return x
    whole = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    all_gather_into(whole, x.contiguous(), group)
    return whole


def reduce_scatter_raw(x: Tensor, group: Group) -> Tensor:
    """This rank's part of the rows of the sum over the group; no gradient. Rows divide by the group's size."""
    if group.size == 1:
        return x
    part = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    _reduce_scatter(part, x.contiguous(), group=group.process_group)
    return part


@dataclass
class Pending:
    """A collective under way; its tensors live until it has ended."""

    result: Tensor
    source: Tensor
    work: dist.Work | None

    def finish(self) -> Tensor:
        """The result, after waiting for it (on a GPU the stream waits, not the host)."""
        if self.work is not None:
            self.work.wait()
        return self.result


def start_all_reduce(x: Tensor, group: Group) -> Pending:
    """Begin to sum over the group, in place."""
    return Pending(x, x, dist.all_reduce(x, group=group.process_group, async_op=True) if group.size > 1 else None)


def start_all_gather(whole: Tensor, part: Tensor, group: Group) -> Pending:
    """Begin to fill ``whole`` with the parts of every rank, in rank order. Groups of more than one."""
    return Pending(whole, part, _all_gather(whole, part, group=group.process_group, async_op=True))


def start_reduce_scatter(part: Tensor, whole: Tensor, group: Group) -> Pending:
    """Begin to fill ``part`` with this rank's part of the sum of ``whole`` over the group. Groups of more than one."""
    return Pending(part, whole, _reduce_scatter(part, whole, group=group.process_group, async_op=True))


def gather_objects(value: ValueT, group: Group) -> list[ValueT]:
    """What every rank brings, in rank order, pickled: for what is said once a run, not in steps."""
    if group.size == 1:
        return [value]
    values: list[ValueT | None] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return cast("list[ValueT]", values)


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, family: OpFamily) -> Tensor:
        ctx.group, ctx.family = group, family
        with scope(family):
            return all_gather_raw(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with scope(ctx.family):
            return reduce_scatter_raw(grads[0], ctx.group), None, None


class _ScatterRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, family: OpFamily) -> Tensor:
        ctx.group, ctx.family = group, family
        with scope(family):
            return reduce_scatter_raw(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with scope(ctx.family):
            return all_gather_raw(grads[0], ctx.group), None, None


def gather_rows(x: Tensor, group: Group, family: OpFamily = "tp_comm") -> Tensor:
    """All-gather along dim 0; the gradient is summed and scattered."""
    return x if group.size == 1 else cast("Tensor", _GatherRows.apply(x, group, family))


def scatter_rows(x: Tensor, group: Group, family: OpFamily = "tp_comm") -> Tensor:
    """Reduce-scatter along dim 0; the gradient is gathered."""
    return x if group.size == 1 else cast("Tensor", _ScatterRows.apply(x, group, family))


def exchange_raw(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """All-to-all of rows: ``send[i]`` go to rank i of the group, ``receive[i]`` come from it; no gradient."""
    if group.size == 1:
        return x
    received = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), list(receive), list(send), group=group.process_group)
    return received


class _ExchangeRows(Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, family: OpFamily
    ) -> Tensor:
        ctx.routes, ctx.family = (receive, send, group), family
        with scope(family):
            return exchange_raw(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with scope(ctx.family):
            return exchange_raw(grads[0], *ctx.routes), None, None, None, None


def exchange_rows(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, family: OpFamily = "dispatch"
) -> Tensor:
    """As :func:`exchange_raw`, with a gradient that goes back the same way."""
    return x if group.size == 1 else cast("Tensor", _ExchangeRows.apply(x, send, receive, group, family))


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else torch.cat([x, x.new_zeros((rows - x.shape[0], *x.shape[1:]))])


def _gather_uneven_raw(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Rows of every rank, in rank order. Padded to the largest, because gloo gathers equal shares only."""
    most = max(sizes)
    whole = all_gather_raw(_pad_rows(x, most), group)
    return torch.cat([whole[most * rank : most * rank + size] for rank, size in enumerate(sizes)])


def _scatter_uneven_raw(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """This rank's ``sizes[index]`` rows of the sum over the group."""
    most = max(sizes)
    padded = torch.cat([_pad_rows(part, most) for part in x.split(list(sizes))])
    return reduce_scatter_raw(padded, group)[: sizes[group.index]]


class _GatherUnevenRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: Group, family: OpFamily) -> Tensor:
        ctx.sizes, ctx.group, ctx.family = sizes, group, family
        with scope(family):
            return _gather_uneven_raw(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with scope(ctx.family):
            return _scatter_uneven_raw(grads[0], ctx.sizes, ctx.group), None, None, None


class _ScatterUnevenRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: Group, family: OpFamily) -> Tensor:
        ctx.sizes, ctx.group, ctx.family = sizes, group, family
        with scope(family):
            return _scatter_uneven_raw(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with scope(ctx.family):
            return _gather_uneven_raw(grads[0], ctx.sizes, ctx.group), None, None, None


def gather_uneven_rows(x: Tensor, sizes: Sequence[int], group: Group, family: OpFamily = "dispatch") -> Tensor:
    """All-gather of ``sizes[i]`` rows from rank i of the group; the gradient is summed and scattered."""
    return x if group.size == 1 else cast("Tensor", _GatherUnevenRows.apply(x, sizes, group, family))


def scatter_uneven_rows(x: Tensor, sizes: Sequence[int], group: Group, family: OpFamily = "dispatch") -> Tensor:
    """Sum over the group, of which rank i keeps its ``sizes[i]`` rows; the gradient is gathered."""
    return x if group.size == 1 else cast("Tensor", _ScatterUnevenRows.apply(x, sizes, group, family))
