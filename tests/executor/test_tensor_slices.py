"""Parts of flat buffers as slices of whole tensors."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.executor.flat_buffer import Span
from moeplan.executor.tensor_slices import boxes, buffer_slices
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, build_trainer, tiny_plan


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), data=st.data())
def test_boxes_are_the_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    whole = torch.arange(size).view(shape)
    found = list(boxes(shape, start, end))
    assert [int(element) for box in found for element in whole[box].flatten()] == list(range(start, end))
    assert all(whole[box].is_contiguous() or whole[box].numel() == 1 for box in found)
    assert len(found) <= 2 * len(shape) - 1


@pytest.mark.parametrize("num_parts", [1, 3, 7])
def test_parts_of_a_buffer_fill_every_tensor_once(num_parts: int) -> None:
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1), RunConfig())
    for one in trainer.optimizer.classes:
        buffer = one.buffer
        whole = {piece.name: torch.full(piece.shape, -1.0) for entry in buffer.entries for piece in entry.pieces}
        cuts = [buffer.num_elements * part // num_parts for part in range(num_parts + 1)]
        for start, end in pairwise(cuts):
            numbers = torch.arange(start, end, dtype=torch.float32)
            for part in buffer_slices(buffer, Span(start, end), numbers, start):
                place = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.values.shape, strict=True))
                assert (whole[part.name][place] == -1).all()
                whole[part.name][place] = part.values
        numbers = torch.cat([tensor.flatten() for tensor in whole.values()])
        assert sorted(numbers.tolist()) == list(range(buffer.num_elements))
        for entry in buffer.entries:
            local = torch.full(entry.parameter.shape, -1.0)
            for piece in entry.pieces:
                local[piece.target] = whole[piece.name][piece.source].view(local[piece.target].shape)
            first = int(local.flatten()[0])
            assert local.flatten().tolist() == list(range(first, first + local.numel()))
