"""Tables of measured runs, as people publish them: one row a run, read cell by cell. A bad row never stops the rest."""

import csv
import io
import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from moeplan.errors import InvalidInputError
from moeplan.files import read_text, short

EMPTY_WORDS = frozenset({"-", "?", "n/a", "na", "null", "unknown", "not stated"})
FLAGS = {"0": False, "1": True} | {"0.0": False, "1.0": True, "false": False, "true": True, "no": False, "yes": True}
REQUIRED_COLUMNS = ("id", "model", "gpu", "n_gpus", "precision", "seq_len", "gbs", "stack")


@dataclass(eq=False)  # not frozen: whoever passes an exception on sets its traceback
class CellError(Exception):
    """What is wrong with one cell: column, what it holds, what is allowed."""

    column: str
    problem: str

    def __str__(self) -> str:
        return f"{self.column}: {self.problem}"


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One row: its cells as text, where it stands, and how to read them."""

    line: int
    cells: dict[str, str]

    @property
    def id(self) -> str:
        return self.text("id") or f"line {self.line}"

    @property
    def group(self) -> str:
        """Rows of one group are one measurement of the same configuration at other scales or releases."""
        return self.text("group_key") or self.text("config_group") or self.id

    def text(self, column: str) -> str:
        """The cell, stripped; empty where the table has no such column, or where a word stands for an empty cell."""
        written = self.cells.get(column, "").strip()
        return "" if written.lower() in EMPTY_WORDS else written

    def with_assumed_sizes(self) -> "PublishedRow":
        """The row with a size it does not state: the fewest GPUs of its degrees, 8 micro-batches a pipeline stage.

        Only ratios of rows that share the assumption mean anything. Raises CellError for degrees that are no counts.
        """
        pp, mbs = self.count("pp", 1), self.count("mbs", 1)
        attention, expert = (
            math.prod(self.count(name, 1) for name in names) for names in (("tp", "cp"), ("ep", "etp"))
        )
        num_gpus = self.count("n_gpus", pp * math.lcm(attention, expert))
        batch = self.count("gbs", 8 * pp * mbs * (num_gpus // (attention * pp)))
        return PublishedRow(self.line, self.cells | {"n_gpus": str(num_gpus), "gbs": str(batch)})

    def number(self, column: str) -> float | None:
        """The cell as a finite number; None where it is empty. Raises CellError."""
        written = self.text(column)
        if not written:
            return None
        try:
            value = float(written)
        except ValueError:
            raise CellError(column, f"got {short(written)}, allowed: a number") from None
        if not abs(value) < 1e300:
            raise CellError(column, f"got {short(written)}, allowed: a finite number")
        return value

    def count(self, column: str, default: int | None = None, *, least: int = 1) -> int:
        """The cell as a whole number of at least ``least``, or the default where it is empty. Raises CellError."""
        value = self.number(column)
        if value is None:
            if default is None:
                raise CellError(column, "not stated")
            return default
        if value < least or value != int(value):
            raise CellError(column, f"got {short(self.text(column))}, allowed: a whole number of at least {least}")
        return int(value)

    def positive(self, column: str) -> float | None:
        """The cell as a number above 0; None where it is empty. Raises CellError."""
        value = self.number(column)
        if value is not None and value <= 0:
            raise CellError(column, f"got {value:g}, allowed: above 0")
        return value

    def flag(self, column: str) -> bool | None:
        """1 on, 0 off, empty unknown. Raises CellError."""
        written = self.text(column)
        found = FLAGS.get(written.lower())
        if written and found is None:
            raise CellError(column, f"got {short(written)}, allowed: 0, 1 or empty")
        return found

    def step_s(self) -> float:
        """Measured seconds of a step: the reference column, the published one, or from tokens per second."""
        for column in ("step_time_s_ref", "step_time_s"):
            value = self.positive(column)
            if value is not None:
                return value
        rate = self.positive("tokens_per_s_per_gpu")
        if rate is None:
            raise CellError("step_time_s_ref", "not stated, and no tokens_per_s_per_gpu either")
        return self.count("gbs") * self.count("seq_len") / self.count("n_gpus") / rate


def read_published_rows(path: Path) -> tuple[list[PublishedRow], list[tuple[int, str]]]:
    """Rows of a CSV table, and the lines that are none (too few or too many cells), with the reason.

    Raises InvalidInputError where the file is no such table at all.
    """
    return read_table(path, REQUIRED_COLUMNS)


def read_table(path: Path, columns: tuple[str, ...]) -> tuple[list[PublishedRow], list[tuple[int, str]]]:
    """As :func:`read_published_rows`, for any CSV table that has ``columns``.

    Damage stays in its line: a quote that nothing closes takes no others along, and bytes that are no text become
    replacement characters.
    """
    lines = io.StringIO(read_text(path, errors="replace")).readlines()
    header, at = _record(lines, 0) if lines else ([], 0)
    if isinstance(header, str):
        raise InvalidInputError(f"{path}: line 1: {header}", "write it as comma-separated text")
    _check_header(header, columns, path)
    rows: list[PublishedRow] = []
    bad: list[tuple[int, str]] = []
    while at < len(lines):
        line = at + 1
        cells, after = _record(lines, at)
        if isinstance(cells, str):
            bad.append((line, cells))
        elif cells and len(cells) != len(header):
            bad.append((line, f"{len(cells)} cells, the header has {len(header)} columns"))
        else:
            at = after
            if cells:
                rows.append(PublishedRow(line, dict(zip(header, cells, strict=True))))
            continue
        at += 1
    return rows, bad


def _record(lines: list[str], at: int) -> tuple[list[str] | str, int]:
    """Cells of the record that begins at a line, or what is wrong with it, and the line after it.

    A quoted cell may hold line breaks; a quote that is still open at the end of the file, or of what csv takes for
    one cell, is an error.
    """
    reader = csv.reader(islice(lines, at, None), strict=True)
    try:
        return next(reader), at + reader.line_num
    except csv.Error as error:
        return str(error), at + 1


def _check_header(header: list[str], columns: tuple[str, ...], path: Path) -> None:
    missing = [column for column in columns if column not in header]
    if missing:
        raise InvalidInputError(
            f"{path}: no column {', '.join(missing)}", "the first line names the columns of a table of measured runs"
        )
    twice = sorted({column for column in header if header.count(column) > 1})
    if twice:
        raise InvalidInputError(f"{path}: two columns {', '.join(twice)}", "keep one of them")
