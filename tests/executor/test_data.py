import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import InvalidInputError
from moeplan.executor.data import StreamSource, open_tokens, permuted
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, tiny_plan

PLAN = tiny_plan(GQA_MODEL, 1)


def write_tokens(path: Path, tokens: list[int], dtype: torch.dtype = torch.uint16) -> Path:
    path.write_bytes(bytes(torch.tensor(tokens).to(dtype).view(torch.uint8).tolist()))
    return path


def test_library_sources_are_the_same_each_time_and_depend_on_seed_step_and_sequence() -> None:
    source = open_tokens(PLAN, RunConfig())
    tokens, targets = source.batch(3, 2, 2)
    assert tokens.shape == targets.shape == (32,)
    torch.testing.assert_close(tokens[1:16], targets[:15])
    again = open_tokens(PLAN, RunConfig()).batch(3, 2, 2)
    torch.testing.assert_close((tokens, targets), again)
    torch.testing.assert_close(tokens[16:], source.batch(3, 3, 1)[0])
    others = [source.batch(4, 2, 2), source.batch(3, 4, 2), open_tokens(PLAN, RunConfig(seed=1)).batch(3, 2, 2)]
    assert all(not torch.equal(tokens, other[0]) for other in others)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_file_gives_its_own_consecutive_ids(tmp_path: Path, dtype: str) -> None:
    path = write_tokens(tmp_path / "ids.bin", list(range(100)), getattr(torch, dtype))
    source = open_tokens(PLAN, RunConfig.model_validate({"data": str(path), "data_dtype": dtype}))
    ids = source.sequence(0, 0)
    assert len(ids) == 17
    assert ids.tolist() == list(range(int(ids[0]), int(ids[0]) + 17))


def test_shortest_file_has_one_sequence(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "ids.bin", list(range(17)))
    assert open_tokens(PLAN, RunConfig(data=str(path))).sequence(5, 7).tolist() == list(range(17))


def test_foreign_token_id_is_named(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "ids.bin", [*range(12), 256, *range(4)])
    source = open_tokens(PLAN, RunConfig(data=str(path)))
    with pytest.raises(InvalidInputError, match=r"ids\.bin: token id 256 at position 12, .* vocab_size 256") as caught:
        source.sequence(0, 0)
    assert "data_dtype" in caught.value.hint


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    cases = [
        (tmp_path / "missing.bin", "file not found"),
        (write_tokens(tmp_path / "short.bin", list(range(16))), r"16 tokens, allowed: at least seq_len \+ 1 = 17"),
        (write_tokens(tmp_path / "odd.bin", [1] * 35, torch.uint8), "35 bytes, allowed: a multiple of 2"),
    ]
    for path, message in cases:
        with pytest.raises(InvalidInputError, match=message):
            open_tokens(PLAN, RunConfig(data=str(path)))


def test_validation_has_the_end_of_the_data_to_itself(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "ids.bin", [place % 250 for place in range(1000)])
    source = open_tokens(PLAN, RunConfig(data=str(path), eval_every=5))
    assert isinstance(source, StreamSource)
    assert source.num_held_out == 50
    starts = [source.validation_batch(index, 1, 4)[0][0].item() for index in range(4)]
    assert starts == [(950 + 33 * index // 3) % 250 for index in range(4)]
    write_tokens(path, [place % 250 if place < 950 else 9999 for place in range(1000)])  # training would raise
    assert all(int(source.sequence(step, 1).max()) < 250 for step in range(300))


def test_without_validation_all_data_is_for_training(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "ids.bin", list(range(17)))
    assert open_tokens(PLAN, RunConfig(data=str(path))).sequence(0, 0).tolist() == list(range(17))
    with pytest.raises(InvalidInputError, match=r"17 tokens, .* and as many for validation"):
        open_tokens(PLAN, RunConfig(data=str(path), eval_every=1))


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "ids.bin", [1] * 1000)
    source = open_tokens(PLAN, RunConfig(data=str(path)))
    assert source.sequence(0, 0).tolist() == [1] * 17
    os.truncate(path, 20)
    with pytest.raises(InvalidInputError, match=r"ids\.bin: ends before token \d+, had 1000 at the start"):
        source.sequence(0, 0)


def test_files_give_their_shares_of_the_sequences(tmp_path: Path) -> None:
    names = [str(write_tokens(tmp_path / f"{number}.bin", [number] * 100)) for number in (1, 2)]
    source = open_tokens(PLAN, RunConfig(data_mix={names[0]: 3.0, names[1]: 1.0}))
    firsts = [int(source.sequence(step, index)[0]) for step in range(100) for index in range(8)]
    assert firsts.count(1) / len(firsts) == pytest.approx(0.75, abs=0.06)  # four standard deviations of 800 draws
    again = open_tokens(PLAN, RunConfig(data_mix={names[0]: 3.0, names[1]: 1.0}))
    torch.testing.assert_close(source.batch(5, 0, 8), again.batch(5, 0, 8))
    held_out = open_tokens(PLAN, RunConfig(data_mix={names[0]: 3.0, names[1]: 1.0}, eval_every=1))
    firsts = held_out.validation_batch(0, 200, 200)[0][::16].tolist()
    assert firsts.count(1) / 200 == pytest.approx(0.75, abs=0.13)  # likewise of 200


def test_validation_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    data, held_out = (write_tokens(tmp_path / name, [token] * 17) for name, token in (("a", 1), ("b", 2)))
    source = open_tokens(PLAN, RunConfig(data=str(data), eval_data=str(held_out), eval_every=1))
    assert set(source.batch(0, 0, 4)[0].tolist()) == {1}
    assert set(source.validation_batch(0, 4, 4)[0].tolist()) == {2}
    built_in = open_tokens(PLAN, RunConfig(eval_data=str(held_out), eval_every=1))
    assert set(built_in.validation_batch(0, 4, 4)[0].tolist()) == {2}
    assert len(set(built_in.batch(0, 0, 4)[0].tolist())) > 2
    with pytest.raises(InvalidInputError, match=r"file not found: .*none"):
        open_tokens(PLAN, RunConfig(data=str(data), eval_data=str(tmp_path / "none"), eval_every=1))
    with pytest.raises(InvalidInputError, match="data_mix: got several files beside data"):
        open_tokens(PLAN, RunConfig(data=str(data), data_mix={str(held_out): 1.0}))


def test_shuffled_data_takes_every_place_once_in_a_turn(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "ids.bin", list(range(12 * 16 + 5)))
    source = open_tokens(PLAN, RunConfig(data=str(path), data_order="shuffled"))
    firsts = [int(source.sequence(step, index)[0]) for step in range(3) for index in range(8)]
    turns = firsts[:12], firsts[12:]
    assert [sorted(turn) for turn in turns] == [list(range(0, 192, 16))] * 2
    assert turns[0] != turns[1] != sorted(turns[1])
    other = open_tokens(PLAN, RunConfig(data=str(path), data_order="shuffled", seed=1))
    assert [int(other.sequence(0, index)[0]) for index in range(8)] != firsts[:8]


def test_shuffled_data_goes_on_where_it_was_with_another_batch(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "ids.bin", list(range(12 * 16 + 5)))
    run = RunConfig(data=str(path), data_order="shuffled")
    first = open_tokens(PLAN, run)
    firsts = [int(first.sequence(0, index)[0]) for index in range(8)]
    again = open_tokens(PLAN.model_copy(update={"global_batch_size": 2}), run).resumed(1, 8 * 16)
    firsts += [int(again.sequence(step, index)[0]) for step in (1, 2) for index in range(2)]
    assert sorted(firsts) == list(range(0, 192, 16))


@given(st.integers(1, 300), st.text(max_size=5))
def test_a_permutation_takes_each_number_to_another(size: int, key: str) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))
