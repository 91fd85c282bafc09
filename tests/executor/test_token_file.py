"""Token files: flat ones and Megatron's pairs, and what is said of broken ones."""

import struct
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import InvalidInputError
from moeplan.executor.data import open_tokens
from moeplan.executor.token_file import HEADER, MAGIC, TokenFile, document_ends, run_files, token_file
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, tiny_plan

CODES = {"uint8": (1, "B"), "int32": (4, "i"), "int64": (5, "q"), "uint16": (8, "H")}


def write_pair(folder: Path, lengths: list[int], id_type: str = "uint16", name: str = "text") -> Path:
    """Ids 0, 1, 2, ... (modulo 200) in sequences of ``lengths``; the path without suffix."""
    code, letter = CODES[id_type]
    ids = array(letter, [place % 200 for place in range(sum(lengths))])
    places = [sum(lengths[:number]) * ids.itemsize for number in range(len(lengths))]
    documents = list(range(len(lengths) + 1))
    header = MAGIC + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    tables = array("i", lengths).tobytes() + array("q", places).tobytes() + array("q", documents).tobytes()
    (folder / f"{name}.idx").write_bytes(header + tables)
    (folder / f"{name}.bin").write_bytes(ids.tobytes())
    return folder / name


@pytest.mark.parametrize("id_type", CODES)
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_pair_is_one_stream_of_its_own_type_whatever_it_is_called(tmp_path: Path, id_type: str, suffix: str) -> None:
    prefix = write_pair(tmp_path, [30, 0, 70], id_type)
    assert token_file(f"{prefix}{suffix}", "uint8") == TokenFile(tmp_path / "text.bin", id_type, 100)  # type: ignore[arg-type]
    source = open_tokens(tiny_plan(GQA_MODEL, 1), RunConfig(data=f"{prefix}{suffix}"))
    ids = source.sequence(0, 0).tolist()
    assert ids == list(range(ids[0], ids[0] + 17))


def test_a_name_with_a_dot_keeps_it(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path, [40], name="wiki.en")
    assert token_file(str(prefix), "uint16").num_tokens == 40


def test_a_bin_file_without_index_is_flat(tmp_path: Path) -> None:
    path = tmp_path / "ids.bin"
    path.write_bytes(bytes(64))
    assert token_file(str(path), "uint16") == TokenFile(path, "uint16", 32)


@given(st.data())
def test_a_pair_broken_off_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    prefix = write_pair(tmp_path_factory.mktemp("pair"), [30, 70])
    path = prefix.with_suffix(data.draw(st.sampled_from([".bin", ".idx"])))
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(InvalidInputError, match=r"broken off|not an index of Megatron"):
        token_file(str(prefix), "uint16")


def test_a_damaged_or_foreign_index_is_refused(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path, [30, 70])
    index = prefix.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    for place, value, message in (
        (0, 0, "not an index of Megatron"),
        (len(MAGIC), 2, "version 2"),
        (len(MAGIC) + 8, 7, "type code 7, allowed: version 1 and codes of whole numbers: 1, 2, 3, 4, 5, 8"),
        (len(MAGIC) + 25 + 8 + 8, 1, "sequence 1 of 70 ids at byte 1, allowed: at byte 60"),
    ):
        index.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
        with pytest.raises(InvalidInputError, match=message):
            token_file(str(prefix), "uint16")
    index.write_bytes(content)
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(InvalidInputError, match=r"text\.idx has no text\.bin beside it"):
        token_file(str(prefix), "uint16")


def test_negative_ids_are_foreign(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path, [17], "int32")
    ids = array("i", [*range(10), -5, *range(6)])
    prefix.with_suffix(".bin").write_bytes(ids.tobytes())
    with pytest.raises(InvalidInputError, match="token id -5 at position 10"):
        open_tokens(tiny_plan(GQA_MODEL, 1), RunConfig(data=str(prefix))).sequence(0, 0)


def test_documents_of_several_sequences_end_where_the_index_says(tmp_path: Path) -> None:
    index = write_pair(tmp_path, [30, 20, 40, 10]).with_suffix(".idx")
    found = token_file(str(index), "uint16")
    assert list(document_ends(found)) == [0, 30, 50, 90, 100]
    content = index.read_bytes()
    tables = len(MAGIC) + HEADER.size
    body, documents = content[tables : tables + 12 * 4], array("q", [0, 2, 4]).tobytes()
    index.write_bytes(MAGIC + struct.pack("<QBQQ", 1, 8, 4, 3) + body + documents)
    assert list(document_ends(found)) == [0, 50, 100]
    index.write_bytes(MAGIC + struct.pack("<QBQQ", 1, 8, 4, 3) + body + array("q", [0, 2, 5]).tobytes())
    with pytest.raises(InvalidInputError, match="a document begins beyond its 4 sequences"):
        document_ends(found)


def test_ends_of_documents_are_counted_from_the_sequence(tmp_path: Path) -> None:
    run = RunConfig(data=str(write_pair(tmp_path, [7, 0, 13, 60, 3, 3, 14])), separate_documents=True, eval_every=1)
    source = open_tokens(tiny_plan(GQA_MODEL, 1), run)
    all_ends = {7, 20, 80, 83, 86, 100}
    for index in range(20):
        start = source.sequence(0, index)[0].item()  # ids count up
        assert source.ends(0, index) == tuple(sorted(end - start for end in all_ends if 0 < end - start <= 16))
        start = source.validation_document(index, 16, 20)[0].item()
        assert source.validation_ends(index, 20) == tuple(
            sorted(end - start for end in all_ends if 0 < end - start <= 16)
        )
    assert not open_tokens(tiny_plan(GQA_MODEL, 1), run.model_copy(update={"separate_documents": False})).ends(0, 0)


def test_documents_of_a_flat_file_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "flat.bin").write_bytes(bytes(400))
    for run in (
        RunConfig(separate_documents=True),
        RunConfig(separate_documents=True, data=str(tmp_path / "flat.bin")),
    ):
        with pytest.raises(InvalidInputError, match="separate_documents: got true") as caught:
            run_files(run, 16)
        assert "tokenize" in caught.value.hint
