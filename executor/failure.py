"""How a worker that fails tells its launcher why: one small file a rank in a folder of the run."""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from moeplan.files import write_text_atomically

RUN_FOLDER_VARIABLE = "MOEPLAN_RUN_FOLDER"
LAUNCHER_VARIABLE = "MOEPLAN_LAUNCHER_PID"
# How a rank says that a signal ended it in good order; the launcher knows which one.
STOPPED = "was asked to stop"
# How lines begin that say which checkpoints a run could not go on from; the launcher passes them on.
RESUME_PREFIX = "resume: "

# What gloo, nccl and the store say when another rank has ended.
_LOST_PEER_WORDS = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "socket closed",
    "remote process exited",
    "failed to recv",
    "nccl communicator was aborted",
)

# Known: a message for the user. Unexpected: our fault. Lost peer: another rank ended first, so its reason counts.
FailureKind = Literal["known", "unexpected", "lost_peer"]


@dataclass(frozen=True)
class Failure:
    """Why a rank ended. ``details`` is the traceback of an unexpected failure.

    ``memory_bytes``: by category, of a rank that ran out of memory.
    """

    rank: int
    kind: FailureKind
    message: str
    hint: str
    exit_code: int
    time_s: float
    details: str = ""
    memory_bytes: dict[str, float] = field(default_factory=dict)


def write_failure(failure: Failure) -> bool:
    """Leave the failure where the launcher looks; False where no launcher said where."""
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return False
    write_text_atomically(Path(folder) / f"rank{failure.rank}.json", json.dumps(asdict(failure)))
    return True


def is_lost_peer(error: Exception) -> bool:
    """Whether an error only tells that another rank has ended."""
    return any(word in str(error).lower() for word in _LOST_PEER_WORDS)


def read_failures(folder: Path) -> list[Failure]:
    """Failures left in the folder, those that tell most first, then by time."""
    order: tuple[FailureKind, ...] = ("known", "unexpected", "lost_peer")
    found = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank*.json")]
    return sorted(found, key=lambda failure: (order.index(failure.kind), failure.time_s))


def write_process_id(rank: int) -> None:
    """Let the launcher know this process, so that it can end it whatever happens in between."""
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if folder and Path(folder).is_dir():
        write_text_atomically(Path(folder) / f"rank{rank}.pid", str(os.getpid()))


def read_process_ids(folder: Path) -> dict[int, int]:
    """Process id by rank."""
    return {
        int(path.stem.removeprefix("rank")): int(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.pid")
    }


def now_s() -> float:
    """Seconds since the epoch, to order failures of one host."""
    return time.time()
