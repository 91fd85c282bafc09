"""Where exchanges run beside compute, first in first out: a stream of its own on a GPU, a thread of its own on a CPU.

On a GPU the host that starts an exchange goes on at once, but where the exchange asks the device for its sizes. The
thread of a CPU takes such waits along.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import lru_cache
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Work = Callable[[], Tensors]


class Ticket(Protocol):
    """An exchange that was started."""

    def wait(self) -> Tensors:
        """What it brings, for the compute that follows."""
        ...


class Lane(Protocol):
    """Its order is that of :meth:`start`, the same on all ranks; so no other thread may use its process groups."""

    holds_up_host: bool  # whether a work that asks the device for sizes holds up who starts it

    def mark(self) -> object:
        """This moment in the compute of the caller."""
        ...

    def start(self, work: Work, inputs: Tensors, mark: object) -> Ticket:
        """Run ``work``, which reads ``inputs``, after the compute before ``mark`` and the works started before."""
        ...

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Say that both a work and the caller's compute use these."""
        ...


class _FutureTicket:
    def __init__(self, future: "Future[Tensors]") -> None:
        self._future = future

    def wait(self) -> Tensors:
        return self._future.result()


class ThreadLane:
    """A thread, which ends with the process."""

    holds_up_host = False

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Work, Future[Tensors]]] = SimpleQueue()
        threading.Thread(target=self._serve, name="exchanges", daemon=True).start()

    def mark(self) -> None:
        """Nothing: compute on a CPU is done when the next begins."""

    def start(self, work: Work, inputs: Tensors, mark: object) -> Ticket:
        """See :class:`Lane`."""
        future: Future[Tensors] = Future()
        self._queue.put((work, future))
        return _FutureTicket(future)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Nothing: memory of a CPU is free when nobody refers to it."""

    def _serve(self) -> None:
        while True:
            work, future = self._queue.get()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
                future.set_exception(error)
            del work, future


class _StreamTicket:
    def __init__(self, results: Tensors, done: torch.cuda.Event, device: torch.device) -> None:
        self._results, self._done, self._device = results, done, device

    def wait(self) -> Tensors:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._done)
        for result in self._results:
            result.record_stream(stream)
        return self._results


class StreamLane:
    """A stream. Tensors that cross between it and compute are said to the allocator, which frees them when both did."""

    holds_up_host = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """An event on the caller's stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def start(self, work: Work, inputs: Tensors, mark: object) -> Ticket:
        """See :class:`Lane`."""
        assert isinstance(mark, torch.cuda.Event)
        self._stream.wait_event(mark)
        self.share(inputs)
        with torch.cuda.stream(self._stream):
            results = work()
        done = torch.cuda.Event()
        done.record(self._stream)
        return _StreamTicket(results, done, self._stream.device)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """See :class:`Lane`."""
        for tensor in tensors:
            tensor.record_stream(self._stream)
            tensor.record_stream(torch.cuda.current_stream(self._stream.device))


@lru_cache
def exchange_lane(device: torch.device) -> Lane:
    """The lane of this process for ``device``."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane()
