"""Who holds the same parameters as this rank, and who has a part of their gradients.

Hybrid sharding (report section 1.7): state is split inside blocks of a pipeline stage's ranks and repeated over the
blocks. Both grids count ranks alike, so one number of blocks cuts dense (dp x cp) and expert (edp) groups alike.
"""

from dataclasses import dataclass

import torch.distributed as dist

from moeplan.executor.mesh import Group, Mesh
from moeplan.folding import Folding
from moeplan.folding import Mesh as Grid


@dataclass(frozen=True)
class Copies:
    """Groups around one class of parameters.

    ``shard``: ranks with the same weights, among which optimizer state (or all state) may be split. ``replica``: ranks
    of other blocks that hold the same shard. ``partial`` (tp for dense, etp for expert parameters): where each rank has
    a part of the gradient of replicated parameters. ``pipeline``: where each has a part of that of shared ones.
    """

    shard: Group
    replica: Group
    partial: Group
    pipeline: Group | None = None


def build_copies(mesh: Mesh, num_replicas: int, embedding_group: Group | None, *, apart: bool) -> tuple[Copies, Copies]:
    """Groups of dense and of expert parameters. Collective over the world; ``num_replicas`` divides dp x cp and edp.

    ``apart``: on communicators of their own, whose work does not queue behind that of layers (NCCL).
    """
    if num_replicas == 1 and not apart:
        alone = Group((mesh.rank,), 0, None)
        return Copies(mesh.dp_cp, alone, mesh.tp, embedding_group), Copies(mesh.edp, alone, mesh.etp)
    dense = _split(mesh, "attention", ("cp", "dp"), num_replicas)
    expert = _split(mesh, "expert", ("edp",), num_replicas)
    return Copies(*dense, mesh.tp, embedding_group), Copies(*expert, mesh.etp)


def shard_ranks(
    folding: Folding, grid: Grid, axes: tuple[str, ...], num_replicas: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Groups that split state, and those that repeat it, of every group of the grid."""
    shards, replicas = [], []
    for ranks in folding.groups(grid, axes):
        size = len(ranks) // num_replicas
        shards += [ranks[start : start + size] for start in range(0, len(ranks), size)]
        replicas += [ranks[start::size] for start in range(size)]
    return shards, replicas


def _split(mesh: Mesh, grid: Grid, axes: tuple[str, ...], num_replicas: int) -> tuple[Group, Group]:
    """This rank's shard and replica group."""
    found = []
    for groups in shard_ranks(mesh.folding, grid, axes, num_replicas):
        for ranks in groups:
            made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if mesh.rank in ranks:
                found.append(Group(ranks, ranks.index(mesh.rank), made))
    shard, replica = found
    return shard, replica
