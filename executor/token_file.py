"""Where a run's token ids lie: a flat file, or the pair .bin and .idx that Megatron's preprocessing writes.

Imports no torch, so that a run can be refused before anything starts. Both kinds are one stream of ids; documents of a
pair follow each other, as they do in Megatron's samples; where they end is read for runs that keep them apart.
"""

import os
import struct
from array import array
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Literal

from moeplan.errors import InvalidInputError
from moeplan.run_config import RunConfig

IdType = Literal["uint8", "uint16", "uint32", "int8", "int16", "int32", "int64"]
ID_BYTES: dict[IdType, int] = {"uint8": 1, "uint16": 2, "uint32": 4, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
MAGIC = b"MMIDIDX\x00\x00"
# Codes of Megatron's index; 6 and 7 are floating point.
_CODES: dict[int, IdType] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
HEADER = struct.Struct("<QBQQ")  # version, code of the ids' type, number of sequences, length of the document index
TYPE_CODES = {id_type: code for code, id_type in _CODES.items()}
_HELD_OUT_FRAC = 0.05
_SEPARATE_HINT = "give a pair .bin and .idx, which says where documents end (moeplan tokenize)"


@dataclass(frozen=True)
class TokenFile:
    """``num_tokens`` ids of ``id_type`` in ``path``, from its first byte on."""

    path: Path
    id_type: IdType
    num_tokens: int


def token_file(data: str, data_dtype: IdType) -> TokenFile:
    """The file of ``--data``: a pair where an index lies beside it (its name with or without suffix), else flat.

    ``data_dtype`` counts for a flat file; a pair says its own. Raises InvalidInputError for a file that is missing,
    broken off, or not what it should be.
    """
    path = Path(data)
    index = next((one for one in _index_names(path) if one.is_file()), None)
    if index is not None:
        return _indexed(index, index.with_suffix(".bin"))
    if path.suffix == ".idx" or not path.is_file():
        raise InvalidInputError(
            f"data: file not found: {path}", "give a flat file of token ids, a pair .bin and .idx, or leave data out"
        )
    width_bytes, size_bytes = ID_BYTES[data_dtype], path.stat().st_size
    if size_bytes % width_bytes:
        raise InvalidInputError(
            f"data {path}: {size_bytes} bytes, allowed: a multiple of {width_bytes} for ids of {data_dtype}",
            "check data_dtype, and that the file was written to its end",
        )
    return TokenFile(path, data_dtype, size_bytes // width_bytes)


def run_files(run: RunConfig, seq_len: int) -> tuple[list[tuple[TokenFile, float]], TokenFile | None]:
    """The run's files with their shares, none for the built-in data, and that of validation where it has its own.

    Raises InvalidInputError for one that is missing, broken off or too short.
    """
    if run.data and run.data_mix:
        raise InvalidInputError("data_mix: got several files beside data", "put that of data into data_mix as well")
    shares = run.data_mix or ({run.data: 1.0} if run.data else {})
    files = [(token_file(name, run.data_dtype), share) for name, share in shares.items()]
    if run.separate_documents and not files:
        raise InvalidInputError("separate_documents: got true without data", _SEPARATE_HINT)
    for found, _ in files:
        check_length(str(found.path), found.num_tokens, run, seq_len)
        if run.separate_documents:
            _check_pair(found)
    if not run.eval_data:
        return files, None
    validation = token_file(run.eval_data, run.data_dtype)
    check_length(str(validation.path), validation.num_tokens, run.model_copy(update={"eval_every": 0}), seq_len)
    if run.separate_documents:
        _check_pair(validation)
    return files, validation


def document_ends(found: TokenFile) -> "array[int]":
    """Where the documents of a pair end, in ids from the start of the file. InvalidInputError for a flat file."""
    index = found.path.with_suffix(".idx")
    _check_pair(found)
    with index.open("rb") as file:
        file.seek(len(MAGIC))
        num_sequences, num_documents = HEADER.unpack(file.read(HEADER.size))[2:]
        lengths = _read(file, "i", num_sequences)
        file.seek(8 * num_sequences, os.SEEK_CUR)
        documents = _read(file, "q", num_documents)
    ends = array("q", accumulate(lengths, initial=0))
    if any(not 0 <= first <= num_sequences for first in documents):
        raise InvalidInputError(
            f"data {index}: a document begins beyond its {num_sequences} sequences", "the index is damaged"
        )
    return array("q", (ends[first] for first in documents))


def _check_pair(found: TokenFile) -> None:
    if found.path.suffix != ".bin" or not found.path.with_suffix(".idx").is_file():
        raise InvalidInputError(f"separate_documents: got true with data {found.path}, a flat file", _SEPARATE_HINT)


def num_held_out(num_tokens: int, run: RunConfig, seq_len: int) -> int:
    """Ids at the end that validation has to itself: a twentieth, at least one sequence; none where it needs none."""
    return max(seq_len + 1, int(num_tokens * _HELD_OUT_FRAC)) if run.eval_every and not run.eval_data else 0


def check_length(name: str, num_tokens: int, run: RunConfig, seq_len: int) -> None:
    """Raise InvalidInputError unless one sequence is left to train on."""
    needed = seq_len + 1 + num_held_out(num_tokens, run, seq_len)
    if num_tokens < needed:
        validation = " and as many for validation" if needed > seq_len + 1 else ""
        raise InvalidInputError(
            f"data {name}: {num_tokens} tokens, allowed: at least seq_len + 1 = {seq_len + 1}{validation}",
            "give more data, or a shorter sequence",
        )


def _index_names(path: Path) -> tuple[Path, ...]:
    if path.suffix in (".bin", ".idx"):
        return (path.with_suffix(".idx"),)
    return () if path.is_file() else (path.with_name(f"{path.name}.idx"),)


def _indexed(index: Path, data: Path) -> TokenFile:
    if not data.is_file():
        raise InvalidInputError(f"data: {index} has no {data.name} beside it", "give both files of the pair")
    size_bytes = index.stat().st_size
    with index.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidInputError(f"data {index}: not an index of Megatron: it begins otherwise", "check the file")
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            _broken_off(index, size_bytes, len(MAGIC) + HEADER.size)
        version, code, num_sequences, num_documents = HEADER.unpack(header)
        if version != 1 or code not in _CODES:
            raise InvalidInputError(
                f"data {index}: version {version} and type code {code}, allowed: version 1 and codes of whole numbers: "
                f"{', '.join(map(str, _CODES))}",
                "tokenize again with Megatron's preprocess_data",
            )
        needed = len(MAGIC) + HEADER.size + 12 * num_sequences + 8 * num_documents
        if size_bytes < needed:
            _broken_off(index, size_bytes, needed)
        lengths, places = _read(file, "i", num_sequences), _read(file, "q", num_sequences)
    return _checked(index, data, _CODES[code], lengths, places)


def _checked(index: Path, data: Path, id_type: IdType, lengths: "array[int]", places: "array[int]") -> TokenFile:
    """Sequences must follow each other without a gap, and the data file must hold them all."""
    expected_bytes = 0
    for number, (length, place) in enumerate(zip(lengths, places, strict=True)):
        if length < 0 or place != expected_bytes:
            raise InvalidInputError(
                f"data {index}: sequence {number} of {length} ids at byte {place}, allowed: at byte {expected_bytes}",
                "the index is damaged: tokenize again",
            )
        expected_bytes += length * ID_BYTES[id_type]
    if data.stat().st_size < expected_bytes:
        _broken_off(data, data.stat().st_size, expected_bytes)
    return TokenFile(data, id_type, expected_bytes // ID_BYTES[id_type])


def _read(file: BinaryIO, code: str, count: int) -> "array[int]":
    values = array(code)
    values.frombytes(file.read(count * values.itemsize))
    return values


def _broken_off(path: Path, size_bytes: int, needed: int) -> None:
    raise InvalidInputError(
        f"data {path}: broken off: {size_bytes} bytes, its index asks for {needed}", "copy it again to its end"
    )
