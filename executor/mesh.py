"""Process groups of both rank grids of a plan: attention (tp, cp, dp) and expert (etp, ep, edp) over one pp.

Every rank creates every group, in one order, because ``torch.distributed`` asks for it (report section 4.1).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from moeplan import folding as grids
from moeplan.cp_schedule import largest_group
from moeplan.folding import Folding
from moeplan.plan import Plan

# Name of a group, its grid, and the axes along which its ranks differ.
GROUP_AXES: tuple[tuple[str, grids.Mesh, tuple[str, ...]], ...] = (
    ("tp", "attention", ("tp",)),
    ("cp", "attention", ("cp",)),
    ("dp", "attention", ("dp",)),
    ("pp", "attention", ("pp",)),
    ("dp_cp", "attention", ("cp", "dp")),
    ("tp_cp", "attention", ("tp", "cp")),
    ("stage", "attention", ("tp", "cp", "dp")),
    ("world", "attention", ("tp", "cp", "dp", "pp")),
    ("etp", "expert", ("etp",)),
    ("ep", "expert", ("ep",)),
    ("etp_ep", "expert", ("etp", "ep")),
    ("edp", "expert", ("edp",)),
)
# Where tokens travel to experts and back.
EXCHANGE_GROUPS = frozenset(("etp", "ep", "etp_ep"))


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other, ascending; ``process_group`` is None where a rank is alone."""

    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Mesh:
    """This rank's groups; see ``GROUP_AXES``. ``etp_ep`` is ordered with etp fastest, as the expert grid is.

    ``cp_heads`` and ``cp_ring`` are the two axes of ``cp``: neighbours that split heads among them (a2a), and ranks
    that many places apart, which pass keys and values on (p2p) or gather them.

    ``cp_blocks``, of dynamic context parallelism: by a power of two the neighbours in ``dp_cp`` that this rank shares a
    pack of that many ranks with, and ``tp_cp_blocks`` those with their tp groups. A last block may be missing.
    """

    rank: int
    folding: Folding
    tp: Group
    cp: Group
    cp_heads: Group
    cp_ring: Group
    dp: Group
    pp: Group
    dp_cp: Group
    tp_cp: Group
    stage: Group
    world: Group
    etp: Group
    ep: Group
    etp_ep: Group
    edp: Group
    cp_blocks: Mapping[int, Group] = field(default_factory=dict)
    tp_cp_blocks: Mapping[int, Group] = field(default_factory=dict)


def build_mesh(
    folding: Folding, rank: int, *, overlaps_exchange: bool = False, cp_head_ranks: int = 1, has_cp_blocks: bool = False
) -> Mesh:
    """The groups of ``rank``. Collective: all ranks of an initialised process group call it with the same folding.

    Groups with the same members share one communicator; a world of one needs no process group at all. Where exchanges
    of tokens run beside other collectives (``overlaps_exchange``), their groups have communicators of their own.
    ``cp_head_ranks``: the size of ``cp_heads``, a divisor of cp. ``has_cp_blocks``: those of every size are made.
    """
    made: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup | None] = {}
    groups: dict[str, Group] = {}
    members: dict[str, list[tuple[int, ...]]] = {name: folding.groups(grid, axes) for name, grid, axes in GROUP_AXES}
    starts = range(0, folding.cp, cp_head_ranks)
    members["cp_heads"] = [ranks[start : start + cp_head_ranks] for ranks in members["cp"] for start in starts]
    members["cp_ring"] = [ranks[start::cp_head_ranks] for ranks in members["cp"] for start in range(cp_head_ranks)]
    sizes = _block_sizes(folding) if has_cp_blocks else ()
    for size in sizes:
        members[f"cp_block_{size}"] = _blocks(members["dp_cp"], size)
        members[f"tp_cp_block_{size}"] = _blocks(members["stage"], size * folding.tp)
    for name, parts in members.items():
        apart = overlaps_exchange and name in EXCHANGE_GROUPS
        for ranks in parts:
            if len(ranks) > 1 and (apart, ranks) not in made:
                is_world = len(ranks) == folding.world_size and not apart
                made[apart, ranks] = dist.group.WORLD if is_world else dist.new_group(list(ranks))
            if rank in ranks:
                groups[name] = Group(ranks, ranks.index(rank), made.get((apart, ranks)))
    cp_blocks, tp_cp_blocks = (
        {size: block for size in sizes if (block := groups.pop(f"{name}_{size}", None)) is not None}
        for name in ("cp_block", "tp_cp_block")
    )
    return Mesh(rank, folding, **groups, cp_blocks=cp_blocks, tp_cp_blocks=tp_cp_blocks)


def _block_sizes(folding: Folding) -> tuple[int, ...]:
    """Powers of two up to the ranks of dp x cp."""
    return tuple(1 << power for power in range(largest_group(folding.dp * folding.cp).bit_length()))


def _blocks(groups: list[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Whole blocks of ``size`` neighbours in each group."""
    return [ranks[start : start + size] for ranks in groups for start in range(0, len(ranks) - size + 1, size)]


def plan_mesh(plan: Plan, rank: int) -> Mesh:
    """The mesh of ``rank`` as the plan needs it. Collective."""
    overlaps = plan.ep_overlap or plan.shared_expert_overlap
    return build_mesh(
        plan.folding,
        rank,
        overlaps_exchange=overlaps,
        cp_head_ranks=plan.point.cp_head_ranks,
        has_cp_blocks=plan.dynamic_cp,
    )
