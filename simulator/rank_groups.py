"""Where the ranks of each group lie: inside one scale-up domain (NVLink, one host) or across several.

Rank order is Megatron's (moeplan.folding): every group is an arithmetic progression of ranks. A job takes equal
blocks of the domains it spans, as cluster schedulers place it: 256 GPUs on domains of 72 use 64 of each.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.point import Point
from moeplan.simulator.op import ALONE, Placement


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Placement of every group a step communicates over; ``pp`` is a pair of neighbouring stages.

    ``cp_heads``: ranks of a cp group that split heads, neighbours; ``cp_ring``: those that pass keys and values on.
    """

    tp: Placement
    cp: Placement
    cp_heads: Placement
    cp_ring: Placement
    dp_cp: Placement
    etp: Placement
    ep: Placement
    etp_ep: Placement
    edp: Placement
    pp: Placement


@lru_cache(maxsize=4096)
def block_size(world_size: int, domain_size: int) -> int:
    """Ranks a job of ``world_size`` puts into one domain: the largest divisor of it that fits."""
    return max(size for size in range(1, min(world_size, domain_size) + 1) if world_size % size == 0)


@lru_cache(maxsize=65536)
def group_placement(world_size: int, size: int, stride: int, block: int) -> Placement:
    """The worst group of ``size`` ranks ``stride`` apart, over domains of ``block`` consecutive ranks."""
    if size == 1:
        return ALONE
    domains = np.arange(world_size).reshape(-1, size, stride) // block
    num_domains = 1 + np.count_nonzero(np.diff(domains, axis=1), axis=1)
    return Placement(size, int(num_domains.max()))


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """Placement of the ranks that split the state of one class of parameters, and of those that repeat it (HSDP)."""

    shard: Placement
    replica: Placement


def shard_groups(point: Point, profile: HardwareProfile) -> tuple[ShardGroups, ShardGroups]:
    """Of dense and of expert parameters: blocks of neighbouring ranks, as many of both as ``dp_replicate`` says."""
    world, number = point.num_gpus, point.dp_replicate
    block = block_size(world, int(profile.scale_up_domain_gpus.value))
    found = []
    for size, stride in ((point.dp * point.cp, point.tp), (point.edp, point.etp * point.ep)):
        part = size // number
        shard, replica = (group_placement(world, *one, block) for one in ((part, stride), (number, part * stride)))
        found.append(ShardGroups(shard, replica))
    return found[0], found[1]


def rank_groups(point: Point, profile: HardwareProfile) -> RankGroups:
    """Placements of a plan's groups on one kind of machine."""
    world, stage = point.num_gpus, point.num_gpus // point.pp
    block = block_size(world, int(profile.scale_up_domain_gpus.value))

    def place(size: int, stride: int) -> Placement:
        return group_placement(world, size, stride, block)

    crosses = world > block  # somewhere two neighbouring stages lie in different domains, and the slowest link counts
    return RankGroups(
        tp=place(point.tp, 1),
        cp=place(point.cp, point.tp),
        cp_heads=place(point.cp_head_ranks, point.tp),
        cp_ring=place(point.cp // point.cp_head_ranks, point.tp * point.cp_head_ranks),
        dp_cp=place(stage // point.tp, point.tp),
        etp=place(point.etp, 1),
        ep=place(point.ep, point.etp),
        etp_ep=place(point.etp * point.ep, 1),
        edp=place(point.edp, point.etp * point.ep),
        pp=ALONE if point.pp == 1 else Placement(2, 2 if crosses else 1),
    )
