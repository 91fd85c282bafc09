"""Work that stops in its middle and lets others run: forward of one micro-batch and backward of another by turns."""

import threading
from collections.abc import Callable

import torch

from moeplan.executor.scopes import STOP_LABEL, TASK_LABEL, labelled


class FiberAbandonedError(Exception):
    """Unwinds a task that nobody will let go on."""


class Fiber:
    """Runs tasks in a thread of its own, but only while :meth:`advance` waits for it: one runs at any time.

    An error of a task is raised by :meth:`advance`.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self._device = name, device
        self._task: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._place, self._is_abandoned = "", False
        # Locks that one thread takes and another gives back: 12 us a turn, where semaphores take 42.
        self._go, self._stopped = threading.Lock(), threading.Lock()
        for lock in (self._go, self._stopped):
            lock.acquire()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def begin(self, task: Callable[[], None]) -> None:
        """Take a task, to be run by :meth:`advance`. The one before must have ended."""
        assert self._task is None, "a fiber runs one task at a time"
        self._task = task

    def advance(self) -> str:
        """Run on to the next stop and return its place; the empty string where the task has ended."""
        assert self._task is not None, "nothing to run"
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._place

    def abandon(self) -> None:
        """End the task where it stands, if there is one: after the failure of another that it would wait for."""
        if self._task is not None:
            self._is_abandoned = True
            self._go.release()
            self._stopped.acquire()
            self._error, self._is_abandoned = None, False

    def stop(self, place: str) -> None:
        """Called by what the task runs, in whatever thread: wait until the task is to go on."""
        self._place = place
        with labelled(STOP_LABEL):
            self._stopped.release()
            self._go.acquire()
        if self._is_abandoned:
            raise FiberAbandonedError

    def _serve(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            self._go.acquire()
            assert self._task is not None
            try:
                if not self._is_abandoned:
                    with labelled(TASK_LABEL):
                        self._task()
            except BaseException as error:  # noqa: BLE001 - raised by advance
                self._error = error
            self._task, self._place = None, ""
            self._stopped.release()
