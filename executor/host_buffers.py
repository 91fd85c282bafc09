"""Storages that leave the device for host memory and come back: pinned buffers that are used again, own streams.

On a CPU there are no streams and a copy is done when it is asked for; everything else is the same.
"""

from collections import defaultdict

import torch
from torch import Tensor


class HostBuffers:
    """Host memory for storages of one device, with one stream for each direction.

    A buffer has the least power of two of bytes that holds the storage: torch pins no less in any case, and rows that
    experts get, of which no two steps have as many, find the buffers of those before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).device  # with its number: "cuda" alone equals no tensor's device
        is_cuda = device.type == "cuda"
        self.to_host, self.to_device = (torch.cuda.Stream(device) if is_cuda else None for _ in range(2))
        self.num_bytes = 0  # of all buffers ever made: they live as long as this object
        self._free: dict[int, list[tuple[Tensor, torch.cuda.Event | None]]] = defaultdict(list)

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of so many bytes or more that nobody uses, pinned beside a GPU.

        Copies on ``to_host`` may begin at once.
        """
        room = 1 << max(0, num_bytes - 1).bit_length()
        if self._free[room]:
            buffer, last_use = self._free[room].pop()
            if last_use is not None and self.to_host is not None:
                self.to_host.wait_event(last_use)
            return buffer
        self.num_bytes += room
        return torch.empty(room, dtype=torch.uint8, pin_memory=self.to_host is not None)

    def give_back(self, buffer: Tensor, last_use: torch.cuda.Event | None) -> None:
        """Let others write to ``buffer`` once ``last_use`` is over."""
        self._free[buffer.numel()].append((buffer, last_use))


class ParkedStorage:
    """The storage of a saved tensor: on the device until :meth:`leave`, and again from :meth:`fetch` on.

    Lives as long as the saved tensors that view it; then its buffer is free again.
    """

    def __init__(self, tensor: Tensor, buffers: HostBuffers) -> None:
        self._buffers = buffers
        self._device: Tensor | None = tensor.detach().new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._num_bytes = self._device.numel()
        self._buffer = buffers.take(self._num_bytes)
        self._host = self._buffer[: self._num_bytes]
        self._is_here = True  # the storage never left, so it can be read without waiting
        stream = buffers.to_host
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(buffers.device))
        with torch.cuda.stream(stream):
            self._host.copy_(self._device, non_blocking=True)
        self._copied = None if stream is None else stream.record_event()

    @property
    def is_on_device(self) -> bool:
        return self._device is not None

    def leave(self) -> None:
        """Free the device's memory; work that follows on the current stream waits for the copy first."""
        self._wait()
        self._device = None

    def fetch(self) -> None:
        """Start the way back, unless the storage is still here."""
        if self._device is not None:
            return
        self._device = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._buffers.device)
        stream = self._buffers.to_device
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._buffers.device))
        with torch.cuda.stream(stream):
            self._device.copy_(self._host, non_blocking=True)
        self._copied, self._is_here = None if stream is None else stream.record_event(), False

    def view(self, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A saved tensor, back on the device; the current stream waits for the copy.

        Backward of exchanges has a stream of its own, so one stream may fetch what another one reads.
        """
        self.fetch()
        assert self._device is not None
        if not self._is_here:
            self._wait()
            if self._device.is_cuda:
                self._device.record_stream(torch.cuda.current_stream(self._buffers.device))
        return torch.empty(0, dtype=dtype, device=self._buffers.device).set_(
            self._device.untyped_storage(), offset, size, stride
        )

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._buffers.device).wait_event(self._copied)

    def __del__(self) -> None:
        if not self._is_here:
            self._wait()  # a copy nobody asked for must not be written over what comes next in its memory
        self._buffers.give_back(self._buffer, self._copied)
