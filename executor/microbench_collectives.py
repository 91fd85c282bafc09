"""Seconds of collectives (gloo, NCCL) by message size, for pairs of ranks (all pairs at once) and for all ranks.

Names of readings: ``COLLECTIVE.NUM_RANKS``. Message bytes as :class:`moeplan.hwprofiles.schema.CollectiveCurve` has
them: the full buffer for all_reduce, all_gather and reduce_scatter, what a rank holds to send for all_to_all, what it
sends for send_recv.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moeplan.executor.microbench_window import Reading
from moeplan.hwprofiles.schema import CollectiveKind
from moeplan.units import KIB, MIB

FP32_BYTES = 4
Group = dist.ProcessGroup
Collective = Callable[[Tensor, Tensor, Group], object]


def _all_gather(whole: Tensor, part: Tensor, group: Group) -> None:
    dist.all_gather_into_tensor(whole, part, group=group)


def _reduce_scatter(whole: Tensor, part: Tensor, group: Group) -> None:
    dist.reduce_scatter_tensor(part, whole, group=group)


def _all_to_all(whole: Tensor, part: Tensor, group: Group) -> None:
    dist.all_to_all_single(torch.empty_like(whole), whole, group=group)


def _send_recv(whole: Tensor, part: Tensor, group: Group) -> None:
    """Everyone sends to the next rank and receives from the one before: together, or NCCL would wait in all sends."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    following = dist.get_global_rank(group, (rank + 1) % size)
    preceding = dist.get_global_rank(group, (rank - 1) % size)
    both = [
        dist.P2POp(dist.isend, whole, following, group),
        dist.P2POp(dist.irecv, torch.empty_like(whole), preceding, group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


COLLECTIVES: dict[CollectiveKind, Collective] = {
    "all_reduce": lambda whole, _, group: dist.all_reduce(whole, group=group),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}


class CollectiveWindow(Protocol):
    """What times a collective, and where its buffers lie."""

    @property
    def quick(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    def seconds_of_collective(self, work: Callable[[], object]) -> tuple[float, ...]: ...


def collectives(window: CollectiveWindow) -> list[Reading]:
    """All collectives for 2 ranks and for all; none with a single process. A rank without a partner stands by."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size == 1:
        return []
    sizes: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB, 8 * MIB)
    if window.device.type == "cuda":
        sizes = (*sizes, 64 * MIB, 512 * MIB)
    elif not window.quick:
        sizes = (KIB, *sizes, 256 * KIB, 32 * MIB)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size - 1, 2)]
    readings = _of_group(window, pairs[rank // 2] if rank // 2 < len(pairs) else None, 2, sizes)
    if world_size > 2:
        readings += _of_group(window, dist.group.WORLD, world_size, sizes)
    return readings


def _of_group(window: CollectiveWindow, group: Group | None, num_ranks: int, sizes: tuple[int, ...]) -> list[Reading]:
    readings = []
    for name, collective in COLLECTIVES.items():
        for size in sizes:
            num_parts = size // FP32_BYTES // num_ranks
            part = torch.zeros(num_parts, device=window.device)
            whole = torch.zeros(num_parts * num_ranks, device=window.device)

            def step(run: Collective = collective, whole: Tensor = whole, part: Tensor = part) -> None:
                if group is not None:
                    run(whole, part, group)

            seconds = window.seconds_of_collective(step)
            if group is not None:
                readings.append(Reading(f"{name}.{num_ranks}", whole.numel() * FP32_BYTES, seconds))
    return readings
