"""Parallel folding: two grids of ranks over one world that share only the pipeline (report section 4.1).

Attention grid: rank = tp + TP*(cp + CP*(dp + DP*pp)). Expert grid: rank = etp + ETP*(ep + EP*(edp + EDP*pp)).
The pipeline is the slowest axis of both, so stage p owns ranks [p*W/PP, (p+1)*W/PP) and the pipeline groups agree.
"""

from dataclasses import dataclass
from typing import Literal

from moeplan.errors import InvalidInputError

Mesh = Literal["attention", "expert"]
AXES: dict[Mesh, tuple[str, ...]] = {
    "attention": ("tp", "cp", "dp", "pp"),  # fastest-varying first
    "expert": ("etp", "ep", "edp", "pp"),
}


@dataclass(frozen=True, slots=True)
class Folding:
    """Degrees of both grids over ``world_size`` ranks; ``dp`` and ``edp`` follow from the rest.

    Raises InvalidInputError where the degrees do not multiply out to the world.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    etp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "cp", "pp", "etp", "ep"):
            if getattr(self, name) < 1:
                raise InvalidInputError(
                    f"{name}: got {getattr(self, name)}, allowed: at least 1", "use 1 to switch it off"
                )
        for names in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
            product = 1
            for name in names:
                product *= getattr(self, name)
            if self.world_size % product:
                written = " x ".join(f"{name} {getattr(self, name)}" for name in names)
                raise InvalidInputError(
                    f"{written} = {product} does not divide the {self.world_size} GPUs",
                    "choose degrees whose product divides the number of GPUs on both meshes",
                )

    @property
    def dp(self) -> int:
        """Replicas of the attention grid."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Replicas of each expert."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pp

    def sizes(self, mesh: Mesh) -> dict[str, int]:
        """Axis sizes of one grid, fastest-varying first."""
        return {axis: getattr(self, axis) for axis in AXES[mesh]}

    def coordinates(self, mesh: Mesh, rank: int) -> dict[str, int]:
        """Position of ``rank`` on every axis of one grid."""
        position, rest = {}, rank
        for axis, size in self.sizes(mesh).items():
            rest, position[axis] = divmod(rest, size)
        return position

    def group(self, mesh: Mesh, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axes``, ascending; ``rank`` included."""
        sizes, own = self.sizes(mesh), self.coordinates(mesh, rank)
        members, stride, base = [0], 1, 0
        for axis, size in sizes.items():
            if axis in axes:
                members = [member + stride * index for index in range(size) for member in members]
            else:
                base += stride * own[axis]
            stride *= size
        return tuple(sorted(base + member for member in members))

    def groups(self, mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """All groups along ``axes``: a partition of the world, ordered by first rank."""
        return sorted({self.group(mesh, axes, rank) for rank in range(self.world_size)})
