"""Measured curves: tables of a rate or a time by size, made monotone so that more work never takes less time."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MonotoneTime:
    """Seconds (or seconds up to a constant factor) by size, non-decreasing, log-log between points.

    Below the first point the time stays (a floor: latency governs); above the last it grows in proportion to the
    size (the rate of the last point holds).
    """

    sizes: tuple[float, ...]
    times: tuple[float, ...]

    @classmethod
    def from_times(cls, sizes: Sequence[float], times: Sequence[float]) -> "MonotoneTime":
        """From readings of a time; a dip (a switch of algorithm, noise) is lifted to the running maximum."""
        order = sorted(range(len(sizes)), key=lambda index: sizes[index])
        running, lifted = 0.0, []
        for index in order:
            running = max(running, times[index])
            lifted.append(running)
        return cls(tuple(float(sizes[index]) for index in order), tuple(lifted))

    @classmethod
    def from_rates(cls, sizes: Sequence[float], rates: Sequence[float]) -> "MonotoneTime":
        """From readings of a rate: the time is size / rate."""
        return cls.from_times(sizes, [size / rate for size, rate in zip(sizes, rates, strict=True)])

    def time_at(self, size: float) -> float:
        """The time for ``size`` (same unit as the table's)."""
        sizes, times = self.sizes, self.times
        if size <= sizes[0]:
            return times[0]
        if size >= sizes[-1]:
            return times[-1] * size / sizes[-1]
        upper = bisect.bisect_right(sizes, size)
        lower = upper - 1
        position = math.log(size / sizes[lower]) / math.log(sizes[upper] / sizes[lower])
        return times[lower] * math.pow(times[upper] / times[lower], position)

    def rate_at(self, size: float) -> float:
        """Size over time: for a table made from rates, the rate itself."""
        return size / self.time_at(size)
