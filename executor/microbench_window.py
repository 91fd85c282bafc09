"""How ``moeplan calibrate`` times: windows in which all processes do the same work, never single calls.

On cores that processes share, a single call is either undisturbed or waits a whole time slice; only a mean over many
slices says what a process gets.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

NUM_WINDOWS = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure, several times: FLOP/s, bytes/s or seconds by ``name``; ``size`` is where its curve has it."""

    name: str
    size: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Times work over windows of at least ``window_s``. ``quick``: few sizes, short windows."""

    quick: bool
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable

    @property
    def window_s(self) -> float:
        return 0.05 if self.quick else 0.2

    def seconds(self, work: Callable[[], object]) -> tuple[float, ...]:
        """Mean seconds of one call in each window; all processes begin each window together."""
        work()
        work()
        return tuple(self._one(work) for _ in range(NUM_WINDOWS))

    def rates(self, amount: float, work: Callable[[], object]) -> tuple[float, ...]:
        """``amount`` (FLOP or bytes of one call) over the mean seconds of each window."""
        return tuple(amount / seconds for seconds in self.seconds(work))

    def seconds_of_collective(self, work: Callable[[], object]) -> tuple[float, ...]:
        """As :meth:`seconds` for work that all ranks must call equally often: rank 0 says how often."""
        start_s = time.perf_counter()
        work()
        work()
        plan = [max(2, round(self.window_s / ((time.perf_counter() - start_s) / 2)))]
        dist.broadcast_object_list(plan, src=0)
        times_s = []
        for _ in range(NUM_WINDOWS):
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(plan[0]):
                work()
            times_s.append((time.perf_counter() - start_s) / plan[0])
        return tuple(times_s)

    def _one(self, work: Callable[[], object]) -> float:
        dist.barrier()
        start_s, num_calls, elapsed_s = time.perf_counter(), 0, 0.0
        while elapsed_s < self.window_s:
            work()
            num_calls += 1
            elapsed_s = time.perf_counter() - start_s
        return elapsed_s / num_calls
