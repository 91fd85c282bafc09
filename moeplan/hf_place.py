"""Where one weight lies in a checkpoint: in which tensor, which part of it, and how its rows are put there."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairedRows:
    """Rotary rows, the last ``num_paired`` of each block of ``block`` rows: (i, i + D/2) here, (2i, 2i + 1) there."""

    block: int
    num_paired: int

    def theirs(self, row: int) -> int:
        """The row there of our ``row``."""
        block, inside = divmod(row, self.block)
        paired = inside - (self.block - self.num_paired)
        if paired < 0:
            return row
        second, pair = divmod(paired, self.num_paired // 2)
        return block * self.block + self.block - self.num_paired + 2 * pair + second


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Our rows in runs of ``size``, each in a block of ``block`` rows there, after ``before`` rows of others."""

    size: int
    block: int
    before: int

    def theirs(self, row: int) -> int:
        """The row there of our ``row``."""
        run, inside = divmod(row, self.size)
        return run * self.block + self.before + inside


@dataclass(frozen=True, slots=True)
class Place:
    """The part ``index`` of the tensor ``name`` of ``shape`` is our weight, or where ``transposed`` its transpose.

    ``rows``: how our rows lie there, unless in our order. ``plus``: ours is theirs plus this.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()
    transposed: bool = False
    rows: PairedRows | BlockRows | None = None
    plus: float = 0.0
