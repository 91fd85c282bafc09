"""Where output goes: results on stdout, progress and logs on stderr. Colour follows NO_COLOR and the terminal."""

import json
import sys
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDTH_WITHOUT_TERMINAL = 140
MIN_TEXT_WIDTH = 16  # of a column that holds sentences


def out_console() -> Console:
    """Console for results."""
    return _console(stderr=False)


def err_console() -> Console:
    """Console for progress and logs."""
    return _console(stderr=True)


class _Console(Console):
    """A console that loses nothing: figures are never cut, and a reader may go away."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """As rich prints, but a table wider than the terminal stays so, for the terminal to break."""
        needed = max((_needed_width(self, one) for one in objects if isinstance(one, Table)), default=0)
        if needed > self.width:
            _Console(stderr=self.stderr, width=needed, highlight=False, markup=False).print(*objects, **settings)
        else:
            super().print(*objects, **settings)

    def on_broken_pipe(self) -> None:
        """Leave it to the command line, which exits with 0; rich would with 1."""
        raise BrokenPipeError


def _needed_width(console: Console, made: Table) -> int:
    """Columns of the terminal in which no cell of figures is cut, and sentences have room to break."""
    for column in made.columns:
        widest = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
        column.min_width = widest if column.no_wrap else min(widest, MIN_TEXT_WIDTH)
    return Measurement.get(console, console.options.update(width=10_000), made).minimum


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
    return _Console(stderr=stderr, width=width, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
