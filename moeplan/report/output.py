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


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(stderr=stderr, width=width, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
