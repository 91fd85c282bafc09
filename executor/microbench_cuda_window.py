"""How ``moeplan calibrate`` times a GPU: back-to-back calls long enough for the power limit to act."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

NUM_WINDOWS = 2
_PROBES = 3  # calls that say how many fill a window
_BURST_CALLS, _REST_S = 3, 1.0


@dataclass(frozen=True, slots=True)
class CudaWindow:
    """Times work on the current device. A reading runs 2.5 windows: half of one to warm up, then two that count."""

    quick: bool
    device: torch.device

    @property
    def long_s(self) -> float:
        """For products, which slow down as the chip heats: load of at least a second a reading."""
        return 0.45 if self.quick else 1.5

    @property
    def short_s(self) -> float:
        return 0.12 if self.quick else 0.5

    def seconds(self, work: Callable[[], object], window_s: float) -> tuple[float, ...]:
        """Mean seconds of one call in each window."""
        work()
        torch.cuda.synchronize()
        num_calls = max(2, math.ceil(window_s / self._mean_s(work, _PROBES)))
        self._mean_s(work, num_calls // 2 + 1)
        return tuple(self._mean_s(work, num_calls) for _ in range(NUM_WINDOWS))

    def rates(self, amount: float, work: Callable[[], object], window_s: float) -> tuple[float, ...]:
        """``amount`` (FLOP or bytes of one call) over the mean seconds of each window."""
        return tuple(amount / seconds for seconds in self.seconds(work, window_s))

    def burst_rates(self, amount: float, work: Callable[[], object]) -> tuple[float, ...]:
        """As :meth:`rates` for a few calls after a rest, before the power limit acts."""
        work()
        torch.cuda.synchronize()
        time.sleep(_REST_S)
        return (amount / self._mean_s(work, _BURST_CALLS),)

    def seconds_of_collective(self, work: Callable[[], object]) -> tuple[float, ...]:
        """As :meth:`seconds` for work that all ranks must call equally often: rank 0 says how often."""
        work()
        torch.cuda.synchronize()
        plan = [max(2, math.ceil(self.short_s / self._mean_s(work, _PROBES)))]
        dist.broadcast_object_list(plan, src=0)
        return tuple(self._mean_s(work, plan[0]) for _ in range(NUM_WINDOWS))

    def _mean_s(self, work: Callable[[], object], num_calls: int) -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(num_calls):
            work()
        torch.cuda.synchronize()
        return (time.perf_counter() - start_s) / num_calls


def graphed(work: Callable[[], object], num_calls: int) -> Callable[[], None]:
    """``num_calls`` of ``work`` as one graph, so that short kernels follow each other without the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            work()
    return graph.replay
