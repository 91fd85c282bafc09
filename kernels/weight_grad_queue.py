"""Weight gradients apart from the gradients of inputs, for schedules that run them later (report section 2.5).

A backward that adds to main gradients hands its addition to :func:`now_or_later`. Where a schedule is delaying them it
is kept with its operands and runs when the schedule has an exchange to hide.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Addition = Callable[[], None]


class WeightGradQueue:
    """Additions that wait, first in first out. Their operands live until then."""

    def __init__(self) -> None:
        self._waiting: deque[Addition] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, add: Addition) -> None:
        """One more that waits."""
        self._waiting.append(add)

    @torch.no_grad()
    def run(self) -> None:
        """All that wait, in the order in which backward made them."""
        while self._waiting:
            self._waiting.popleft()()


class _Delaying:
    """The queue that takes additions, of the whole process: on a GPU backward runs in a thread of autograd's."""

    queue: WeightGradQueue | None = None


@contextmanager
def delaying(queue: WeightGradQueue | None) -> Iterator[None]:
    """Backward inside puts its weight gradients into ``queue``; None: adds them at once."""
    outer, _Delaying.queue = _Delaying.queue, queue
    try:
        yield
    finally:
        _Delaying.queue = outer


def now_or_later(add: Addition) -> None:
    """Run ``add``, which adds one weight gradient, or let it wait where they are delayed."""
    if _Delaying.queue is None:
        add()
    else:
        _Delaying.queue.put(add)
