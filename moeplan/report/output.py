"""Where output goes: results on stdout, progress and logs on stderr. Colour follows NO_COLOR and the terminal."""

import json
import sys
from typing import Any

from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 140


def out_console() -> Console:
    """Console for results."""
    return _console(stderr=False)


def err_console() -> Console:
    """Console for progress and logs."""
    return _console(stderr=True)


class _Console(Console):
    """A console whose reader may go away, as ``head`` does: rich would exit with code 1, the command line with 0."""

    def on_broken_pipe(self) -> None:
        """Leave it to the command line."""
        raise BrokenPipeError


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
    return _Console(stderr=stderr, width=width, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
