"""Ends a run that makes no progress, naming the rank at fault and the collective that the others wait in.

A thread of each rank looks at where the rank's own code stands, so that watching costs the run nothing. The ranks tell
each other through the store of the rendezvous, which works while their collectives do not.
"""

import json
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol, Self

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from moeplan.executor.failure import RUN_FOLDER_VARIABLE, Failure, now_s, read_process_ids, write_failure

# Between looks; and for the other ranks to say where they are, several looks long.
_INTERVAL_S, _ANSWER_S = 1.0, 5.0
_KEY = "moeplan/hang"
_COLLECTIVES_FILE = "torch/distributed/distributed_c10d.py"
_SKIPPED = ("wrapper", "_")  # decorators and what c10d calls inside itself
# Lines of ours in which the host waits for what was started before: a message, or the device.
_WAITING = (".wait(", ".tolist(", ".item(", "synchronize(")
_OWN_FOLDERS = ("executor", "kernels")


class Watched(Protocol):
    """What is watched. ``progress`` changes as the step goes on; ``current_step`` is 0 outside of steps."""

    progress: int
    current_step: int


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank's code stands. ``collective`` is empty outside of one; ``ranks`` are those that take part."""

    place: str
    collective: str = ""
    ranks: tuple[int, ...] = ()


class Watchdog:
    """Watches one rank while in its ``with`` block. ``end`` gets the message on the rank that found the hang first."""

    def __init__(self, watched: Watched, store: Store, timeout_s: float, end: Callable[[str], None]) -> None:
        self.watched, self.store, self.timeout_s, self.end = watched, store, timeout_s, end
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._main = threading.get_ident()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        seen, since_s = (0, 0), time.monotonic()
        try:
            while not self._over.wait(_INTERVAL_S):
                now = (self.watched.current_step, self.watched.progress)
                if now != seen or not now[0]:
                    seen, since_s = now, time.monotonic()
                is_late = time.monotonic() - since_s > self.timeout_s
                if is_late or self.store.check([_KEY]):
                    self.store.set(f"{_KEY}/{self.rank}", json.dumps(asdict(whereabouts(self._main))))
                    if is_late and self.store.add(_KEY, 1) == 1:
                        self.end(self._message())
                    return
        except dist.DistError:
            return  # the store ended first: the run is over, and whoever ended it says why

    def _message(self) -> str:
        """What every rank was doing, those that nobody waits for last."""
        keys = {rank: f"{_KEY}/{rank}" for rank in range(self.world_size)}
        deadline_s = time.monotonic() + _ANSWER_S
        while not self.store.check(list(keys.values())) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        found = {rank: _parsed(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        return hang_message(self.watched.current_step, self.timeout_s, self.world_size, found)


def hang_message(step: int, timeout_s: float, world_size: int, found: dict[int, Whereabouts]) -> str:
    """The fault first: ranks that do not answer, else those outside of a collective; then who waits in which."""
    silent = [rank for rank in range(world_size) if rank not in found]
    parts = [f"{_named(silent)} does not answer"] if silent else []
    elsewhere: dict[str, list[int]] = {}
    waiting: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, where in found.items():
        if where.collective:
            waiting.setdefault((where.collective, where.ranks), []).append(rank)
        else:
            elsewhere.setdefault(where.place, []).append(rank)
    parts += [f"{_named(ranks)} is in {place or 'code that is not ours'}" for place, ranks in elsewhere.items()]
    parts += [
        f"{_named(ranks)} waits in {name}" + (f" of ranks {', '.join(map(str, group))}" if group else "")
        for (name, group), ranks in waiting.items()
    ]
    return f"no progress for {timeout_s:g} s in step {step}: {'; '.join(parts)}"


def whereabouts(main_thread: int) -> Whereabouts:
    """Where this process stands, asked from a thread of its own: in the main thread, or in autograd's on a GPU."""
    frames = sys._current_frames()  # noqa: SLF001 - documented, and the only way to ask
    frames.pop(threading.get_ident(), None)
    first = _standing(frames.pop(main_thread, None))
    if first.collective:
        return first
    others = (_standing(frame) for frame in frames.values())
    return next((one for one in others if one.collective and one.place), first)


def _standing(frame: FrameType | None) -> Whereabouts:
    """The innermost collective of a thread, and our code that called it."""
    collective = ""
    ranks: tuple[int, ...] = ()
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if path.match(_COLLECTIVES_FILE) and not name.startswith(_SKIPPED):
            collective, ranks = name, _ranks_of(frame)
        if path.parent.name in _OWN_FOLDERS:
            line = linecache.getline(str(path), frame.f_lineno).strip()
            if not collective and any(word in line for word in _WAITING):
                collective = f"`{line}`"
            return Whereabouts(f"{path.parent.name}/{path.name}, {name}", collective, ranks)
        frame = frame.f_back
    return Whereabouts("", collective, ranks)


def end_process(rank: int, message: str) -> None:
    """Leave the message for the launcher, or on stderr, and end this process and its host's others: they are stuck."""
    hint = "look at that rank's host and network, or raise hang_timeout_s where a step may take so long"
    if not write_failure(Failure(rank, "known", message, hint, 1, now_s())):
        sys.stderr.write(f"error: {message}\nhint: {hint}\n")
        sys.stderr.flush()
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    for other, process in (read_process_ids(Path(folder)) if folder else {}).items():
        if other != rank:  # on this host; torchrun would wait 30 s for one that is stopped
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    os._exit(1)


def _ranks_of(frame: FrameType) -> tuple[int, ...]:
    group = frame.f_locals.get("group")
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError, TypeError):
        return ()


def _parsed(content: bytes) -> Whereabouts:
    fields = json.loads(content)
    return Whereabouts(fields["place"], fields["collective"], tuple(fields["ranks"]))


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
