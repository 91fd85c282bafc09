"""Errors a user can cause or should see, each with one line of message, one of hint, and an exit code.

Exit codes: 0 ok, 1 our fault or a failed run, 2 invalid input, 3 no feasible plan, 4 comparison outside tolerance.
"""

import difflib
from collections.abc import Iterable


class MoeplanError(Exception):
    """Base of every expected failure. ``message``: what, value got, what is allowed, where. ``hint``: what to do."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidInputError(MoeplanError):
    """A file, flag or value given by the user cannot be used."""

    exit_code = 2


class InfeasibleError(MoeplanError):
    """No plan satisfies the limits."""

    exit_code = 3


class ToleranceError(MoeplanError):
    """A comparison lies outside its tolerance."""

    exit_code = 4


class RunFailedError(MoeplanError):
    """A training run ended before its last step."""

    exit_code = 1


class OutOfMemoryError(RunFailedError):
    """A rank had no more memory. ``memory_bytes``: what it needed at least, by category; empty where nobody knows."""

    def __init__(self, message: str, hint: str = "", memory_bytes: dict[str, float] | None = None) -> None:
        super().__init__(message, hint)
        self.memory_bytes = memory_bytes or {}


def nearest_names(name: str, known: Iterable[str]) -> str:
    """A hint naming the known names most like ``name``, or all of them when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    return f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(names)}"
