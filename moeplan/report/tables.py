"""Tables that several reports share. They read without colour."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from moeplan.results import Figures
from moeplan.units import format_bytes, format_seconds
from moeplan.vocabulary import FAMILY_MEANING, MEMORY_MEANING, OP_FAMILIES


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> Table:
    """A plain table: the first ``left`` columns aligned left, figures right; ids and figures are never broken."""
    made = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold", padding=(0, 1)
    )
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right", overflow="fold", no_wrap=index >= left)
    for row in rows:
        made.add_row(*row)
    return made


def with_text_last(made: Table) -> Table:
    """The last column holds sentences: aligned left and broken where it must be."""
    made.columns[-1].justify, made.columns[-1].no_wrap = "left", False
    return made


def memory_table(figures: Figures) -> Table:
    """Memory by category (rows) and pipeline rank (columns), with the sum; of many ranks, the extremes."""
    num_ranks = len(next(iter(figures.memory_bytes.values())))
    shown = range(num_ranks) if num_ranks <= 8 else [0, 1, figures.peak_rank, num_ranks - 2, num_ranks - 1]
    ranks = sorted(set(shown))
    rows = [
        [category, *(format_bytes(values[rank]) for rank in ranks), MEMORY_MEANING[category]]
        for category, values in figures.memory_bytes.items()
    ]
    sums = [sum(values[rank] for values in figures.memory_bytes.values()) for rank in ranks]
    rows.append(["sum", *(format_bytes(value) for value in sums), ""])
    columns = ["category", *(f"rank {rank}" for rank in ranks), "what it is"]
    return with_text_last(table("Memory by pipeline rank", columns, rows))


def time_table(figures: Figures) -> Table:
    """Seconds by op family: total work, and what of it lengthens the step."""
    rows = [
        [
            family,
            format_seconds(figures.time_s[family].total_s),
            format_seconds(figures.time_s[family].exposed_s),
            f"{100 * figures.time_s[family].exposed_s / figures.step_s:.1f} %",
            FAMILY_MEANING[family],
        ]
        for family in OP_FAMILIES
        if family in figures.time_s and figures.time_s[family].total_s > 0
    ]
    columns = ["family", "total", "exposed", "of step", "what it is"]
    return with_text_last(table("Time of a step by op family", columns, rows))
