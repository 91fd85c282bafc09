"""Padding of each expert's rows to whole tiles."""

import torch
from hypothesis import given
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
