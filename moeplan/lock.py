"""Lock files: recorded figures of plans, which ``moeplan check`` holds later predictions to."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from moeplan import __version__
from moeplan.errors import InvalidInputError
from moeplan.files import read_json, validate
from moeplan.plan import Plan
from moeplan.record import Record
from moeplan.results import Figures

LOCK_VERSION = 1
# Figures judged, and how far a recomputed prediction may move from the recorded one before check fails.
DEFAULT_TOLERANCES: dict[str, float] = {"step_s": 0.02, "peak_memory_bytes": 0.01}


class LockEntry(Record):
    """One plan with the figures recorded for it, and its own tolerances where they differ from the defaults."""

    plan: Plan
    recorded: Figures
    tolerances: dict[str, float] = Field(default={})

    @model_validator(mode="after")
    def _same_plan(self) -> "LockEntry":
        if self.recorded.plan_id != self.plan.plan_id:
            raise ValueError(f"figures of plan {self.recorded.plan_id} beside plan {self.plan.plan_id}")
        return self


class Lock(Record):
    """All entries, by plan and kind of figures, with the release that wrote them."""

    lock_version: Literal[1] = 1
    moeplan_version: str = __version__
    entries: tuple[LockEntry, ...] = Field(default=())

    def with_entry(self, entry: LockEntry) -> "Lock":
        """A lock in which ``entry`` replaces the one of the same plan and kind of figures, or is added."""
        kept = [old for old in self.entries if _key(old) != _key(entry)]
        return Lock(entries=tuple(sorted([*kept, entry], key=_key)))


def _key(entry: LockEntry) -> tuple[str, str, str]:
    return entry.plan.model.name, entry.plan.plan_id, entry.recorded.kind


def read_lock(path: Path) -> Lock:
    """The lock of a JSON file. Raises InvalidInputError for a corrupt one, and for one of another lock version."""
    data: Any = read_json(path)
    if not isinstance(data, dict) or "lock_version" not in data:
        raise InvalidInputError(
            f"{path} is not a lock: it has no lock_version", "write one: moeplan predict PLAN --lock"
        )
    if data["lock_version"] != LOCK_VERSION:
        raise InvalidInputError(
            f"{path}: lock_version: got {data['lock_version']!r}, allowed: {LOCK_VERSION}; moeplan "
            f"{data.get('moeplan_version', 'unknown')} wrote it, this is {__version__}",
            "record it again with this release: moeplan predict PLAN --lock",
        )
    return validate(Lock, data, str(path))


def lock_text(lock: Lock) -> str:
    """JSON of a lock, stable under rewriting."""
    return lock.model_dump_json(indent=1) + "\n"
