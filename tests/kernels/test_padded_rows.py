"""Padding of each expert's rows to whole tiles."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.kernels.padded_rows import TILE, PaddedRows, dense_rows, padded_rows

counts_of_experts = st.lists(st.integers(0, 400), min_size=1, max_size=9)


def _rows(counts: list[int]) -> PaddedRows:
    return padded_rows(torch.tensor(counts).cumsum(0).to(torch.int32), sum(counts))


@given(counts_of_experts)
def test_every_row_comes_once_and_tiles_hold_one_expert(counts: list[int]) -> None:
    rows = _rows(counts)
    source = rows.source_P.tolist()
    assert [row for row in source if row < sum(counts)] == list(range(sum(counts)))
    expert_of_row = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for tile, expert in enumerate(rows.expert_of_tile.tolist()):
        held = [row for row in source[tile * TILE : (tile + 1) * TILE] if row < sum(counts)]
        assert {expert_of_row[row] for row in held} <= {expert}
        assert len(held) == rows.count_of_tile[tile]


@given(counts_of_experts)
def test_experts_end_at_whole_tiles(counts: list[int]) -> None:
    rows = _rows(counts)
    ends, expected = rows.padded_end_E.tolist(), 0
    for end, count in zip(ends, counts, strict=True):
        expected += -(-count // TILE) * TILE
        assert end == expected
    assert ends[-1] <= rows.num_padded <= sum(counts) + (TILE - 1) * len(counts)


@given(st.integers(0, 1000))
def test_one_matrix_is_one_expert(num_rows: int) -> None:
    rows = dense_rows(num_rows, torch.device("cpu"))
    assert rows.source_P[:num_rows].tolist() == list(range(num_rows))
    assert rows.padded_end_E.tolist() == [rows.num_padded]
    assert rows.num_padded - num_rows < TILE


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
@settings(max_examples=15)
@given(st.lists(st.sampled_from([0, 1, 127, 128, 129, 300, 5000]), min_size=2, max_size=9))
def test_one_launch_finds_the_same_tiles(num_rows: list[int]) -> None:
    from moeplan.kernels import padded_rows_triton

    offsets_E = torch.tensor(num_rows).cumsum(0).to(torch.int32)
    expected = padded_rows(offsets_E, sum(num_rows))
    got = padded_rows_triton.tiles(offsets_E, expected.num_tiles, TILE)
    fields = ("padded_end_E", "expert_of_tile", "row_of_tile", "count_of_tile")
    for one, name in zip(got, fields, strict=True):
        assert one.dtype == torch.int32
        assert torch.equal(one, getattr(expected, name)), name
