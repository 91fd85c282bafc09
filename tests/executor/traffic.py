"""Counting what collectives send, call by call, where the executor hands them to torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch.distributed as dist
from torch import Tensor

from moeplan.executor import collectives

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective call of this rank.

    ``message_bytes``: all_reduce the buffer of a rank; all_gather and reduce_scatter the whole buffer; all_to_all all
    that the rank sends, its own part included; send the message to another rank. ``to_bytes``, of all_to_all, by rank
    of the group.
    """

    kind: Collective
    ranks: tuple[int, ...]
    message_bytes: int
    to_bytes: tuple[int, ...] = ()


@contextmanager
def counting_traffic() -> Iterator[list[Sent]]:
    """The calls made inside, in order, on this rank and in any of its threads (backward has one of its own)."""
    calls: list[Sent] = []
    all_reduce, all_to_all = dist.all_reduce, dist.all_to_all_single
    send_receive = dist.batch_isend_irecv
    all_gather, reduce_scatter = collectives._all_gather, collectives._reduce_scatter

    def note(kind: Collective, group: Any, message_bytes: int, to_bytes: Sequence[int] = ()) -> None:
        calls.append(Sent(kind, tuple(dist.get_process_group_ranks(group)), message_bytes, tuple(to_bytes)))

    def counted_reduce(x: Tensor, *arguments: Any, **options: Any) -> Any:
        note("all_reduce", options["group"], x.nbytes)
        return all_reduce(x, *arguments, **options)

    def counted_gather(whole: Tensor, part: Tensor, **options: Any) -> Any:
        note("all_gather", options["group"], whole.nbytes)
        return all_gather(whole, part, **options)

    def counted_scatter(part: Tensor, whole: Tensor, **options: Any) -> Any:
        note("reduce_scatter", options["group"], whole.nbytes)
        return reduce_scatter(part, whole, **options)

    def counted_exchange(there: Tensor, here: Tensor, come: list[int], go: list[int], **options: Any) -> Any:
        row_bytes = here.element_size() * here.shape[1:].numel()
        note("all_to_all", options["group"], here.nbytes, [rows * row_bytes for rows in go])
        return all_to_all(there, here, come, go, **options)

    def counted_sends(operations: list[Any]) -> Any:
        for operation in operations:
            if operation.op is dist.isend:
                note("send", operation.group, operation.tensor.nbytes)
        return send_receive(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", counted_sends)
        patch.setattr(dist, "all_reduce", counted_reduce)
        patch.setattr(dist, "all_to_all_single", counted_exchange)
        patch.setattr(collectives, "_all_gather", counted_gather)
        patch.setattr(collectives, "_reduce_scatter", counted_scatter)
        yield calls
