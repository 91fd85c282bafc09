"""What a rank holds, as rectangular slices of whole tensors: the form in which checkpoints are folding-free.

Optimizer state lies in flat buffers that are cut anywhere, so a part of one is first cut into boxes of its parameters.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from moeplan.executor.flat_buffer import FlatBuffer, Span
from moeplan.executor.parameters import Piece

Box = tuple[slice, ...]


@dataclass(frozen=True)
class TensorSlice:
    """``values`` lie at ``offsets`` of the whole tensor ``name`` of ``shape``; a view, so that it can be read into."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Elements ``start`` to ``end`` of a tensor in storage order as boxes, each of them contiguous, in order."""
    if start >= end:
        return
    if len(shape) == 1:
        yield (slice(start, end),)
        return
    row_size = math.prod(shape[1:])
    first, last = -(-start // row_size), end // row_size
    if first > last:  # inside one row
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row_size)
    if first < last:
        yield (slice(first, last), *(slice(0, size) for size in shape[1:]))
    yield from _in_row(shape, last, last * row_size, end)


def _in_row(shape: tuple[int, ...], row: int, start: int, end: int) -> Iterator[Box]:
    row_start = row * math.prod(shape[1:])
    for box in boxes(shape[1:], start - row_start, end - row_start):
        yield (slice(row, row + 1), *box)


def buffer_slices(buffer: FlatBuffer, span: Span, flat: Tensor, flat_start: int) -> Iterator[TensorSlice]:
    """Elements ``span`` of a buffer as slices; ``flat`` holds the buffer's elements from ``flat_start`` on."""
    for entry, own in buffer.spans():
        shape, part = tuple(entry.parameter.shape), own.overlap(span)
        for box in boxes(shape, part.start - own.start, part.end - own.start):
            first = own.start - flat_start + _first_element(shape, box)
            sizes = [one.stop - one.start for one in box]
            values = flat[first : first + math.prod(sizes)].view(sizes)
            for piece in entry.pieces:
                found = _piece_slice(piece, box, values)
                if found is not None:
                    yield found


def _first_element(shape: tuple[int, ...], box: Box) -> int:
    element = 0
    for size, one in zip(shape, box, strict=True):
        element = element * size + one.start
    return element


def _piece_slice(piece: Piece, box: Box, values: Tensor) -> TensorSlice | None:
    """What of a piece lies in a box of its parameter, whose values are given."""
    starts, stops = [], []
    for place, one in zip(piece.target, box, strict=True):
        starts.append(max(place.start, one.start))
        stops.append(min(place.stop, one.stop))
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    inside = tuple(
        slice(start - one.start, stop - one.start) for start, stop, one in zip(starts, stops, box, strict=True)
    )
    found = values[inside]
    stacked = len(piece.target) - len(piece.source)  # a stack of tensors has a dimension that they have not
    for _ in range(stacked):
        found = found[0]
    offsets = tuple(
        source.start + start - place.start
        for source, start, place in zip(piece.source, starts[stacked:], piece.target[stacked:], strict=True)
    )
    return TensorSlice(piece.name, piece.shape, offsets, found)
