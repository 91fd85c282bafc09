"""What a run is measured by: seconds of a step, memory of the process, and seconds by op family from a trace."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch._C._profiler import _ExperimentalConfig  # torch.profiler does not export it
from torch.profiler import ProfilerActivity, profile, record_function

from moeplan.errors import RunFailedError
from moeplan.executor.scopes import tracing
from moeplan.executor.trace import STEP_LABEL, family_times_of, longest_kernels_of
from moeplan.results import FamilyTime
from moeplan.units import KIB
from moeplan.vocabulary import OpFamily

_STATUS = Path("/proc/self/status")


class StepTimer:
    """Wall seconds of each step from the end of all device work before it to the end of its own.

    The first ``num_untimed`` steps (allocator, thread pools, compilation) count in ``all_times_s`` alone.
    """

    def __init__(self, num_untimed: int, device: torch.device) -> None:
        self.all_times_s: list[float] = []
        self._num_untimed = num_untimed
        self._device = device

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time what runs inside as one step."""
        synchronize(self._device)
        start_s = time.perf_counter()
        yield
        synchronize(self._device)
        self.all_times_s.append(time.perf_counter() - start_s)

    @property
    def times_s(self) -> tuple[float, ...]:
        """Seconds of the timed steps."""
        return tuple(self.all_times_s[self._num_untimed :])

    @property
    def step_s(self) -> float:
        """Median of the timed steps. RunFailedError where there is none."""
        if not self.times_s:
            raise RunFailedError(
                f"no step was timed: {len(self.all_times_s)} steps, the first {self._num_untimed} untimed",
                "raise steps, or lower warmup_steps_untimed",
            )
        return statistics.median(self.times_s)

    @property
    def spread_frac(self) -> float:
        """Half of the range from the first to the ninth decile of the timed steps, over their median."""
        return spread_frac(self.times_s)


def spread_frac(readings: Sequence[float]) -> float:
    """Half of the range from first to ninth decile over the median; 0 for a single reading."""
    if len(readings) < 2:
        return 0.0
    deciles = statistics.quantiles(readings, n=10, method="inclusive")
    return (deciles[-1] - deciles[0]) / 2 / statistics.median(readings)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepTrace(AbstractContextManager["StepTrace"]):
    """Traces the steps that run inside; ``family_times`` then says where their time went.

    Tracing slows steps of many small ops (1 to 2 us an op), so traced steps should not be the timed ones. The trace
    stays in memory and goes with this object.
    """

    def __init__(self, device: torch.device) -> None:
        activities, config = [ProfilerActivity.CPU], _ExperimentalConfig(profile_all_threads=True)
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._device = device
        # Without acc_events torch 2.11 warns of lost events.
        self._profile = profile(activities=activities, acc_events=True, experimental_config=config)
        self._tracing, self._step = tracing(), record_function(STEP_LABEL)

    def __enter__(self) -> Self:
        synchronize(self._device)
        self._tracing.__enter__()
        self._profile.__enter__()
        self._step.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        synchronize(self._device)
        self._step.__exit__(None, None, None)
        self._profile.__exit__(None, None, None)
        self._tracing.__exit__(None, None, None)

    def family_times(self, num_steps: int) -> dict[OpFamily, FamilyTime]:
        """Seconds of one step by op family, mean over the ``num_steps`` traced; families without time are left out.

        Exposed seconds, with ``host``, sum to the traced step.
        """
        return family_times_of(self._profile.events() or (), num_steps, on_cuda=self._device.type == "cuda")

    def kernels(self) -> dict[OpFamily, str]:
        """Name of the kernel with the most time in each family that has a choice of them; empty on a CPU."""
        return longest_kernels_of(self._profile.events() or ()) if self._device.type == "cuda" else {}


def resident_bytes() -> int:
    """Memory of this process in RAM now (VmRSS), shared libraries included. Linux only."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Largest :func:`resident_bytes` since the process began or :func:`reset_peak_resident` was called (VmHWM)."""
    return _status_bytes("VmHWM")


def reset_peak_resident() -> bool:
    """Let :func:`peak_resident_bytes` start again from now; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise RunFailedError(f"cannot read {_STATUS}: {error}", "resident memory is measured on Linux only") from None
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(f"{key}:"))


@dataclass(frozen=True)
class PeakBytes:
    """Most memory at once in live tensors, and most that was taken for them.

    On CUDA the second is what torch's allocator reserved; on a CPU both are the peak of resident memory.
    """

    allocated: int
    reserved: int


def peak_device_bytes(device: torch.device) -> PeakBytes:
    """Peaks since the process began or they were last reset."""
    if device.type == "cuda":
        return PeakBytes(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    return PeakBytes(peak_resident_bytes(), peak_resident_bytes())


def context_bytes(device: torch.device) -> int:
    """Memory of a GPU that is gone beside the allocator's: context, loaded kernels, communicators, other processes."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return max(0, total_bytes - free_bytes - torch.cuda.memory_reserved(device))
