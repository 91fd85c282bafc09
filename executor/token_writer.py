"""Writes the pair .bin and .idx of Megatron's preprocessing, one sequence a document; see token_file for reading it."""

import tempfile
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from moeplan.errors import InvalidInputError
from moeplan.executor.token_file import HEADER, ID_BYTES, MAGIC, TYPE_CODES, IdType

_ARRAYS: dict[IdType, str] = {"uint8": "B", "uint16": "H", "int32": "i"}
# Megatron's own bound: above it ids take four bytes.
_MAX_UINT16_VOCAB = 65500


def id_type_of(vocab_size: int) -> IdType:
    """The smallest type that Megatron reads ids of this vocabulary in; bytes for one of 256."""
    if vocab_size <= 256:
        return "uint8"
    return "uint16" if vocab_size < _MAX_UINT16_VOCAB else "int32"


class TokenWriter:
    """Writes documents under a temporary name, and gives both files their names once all is written.

    Raises InvalidInputError where they exist, or cannot be written.
    """

    def __init__(self, prefix: Path, id_type: IdType) -> None:
        self.id_type = id_type
        self.data, self.index = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
        for path in (self.data, self.index):
            if path.exists():
                raise InvalidInputError(f"out: {path} exists", "remove it, or name another prefix")
        self.lengths = array("i")

    def __enter__(self) -> Self:
        try:
            self.data.parent.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(dir=self.data.parent, prefix=f".{self.data.name}.")
            self._file = (Path(self._folder.name) / "bin").open("wb")
        except OSError as error:
            raise self._cannot(error) from None
        return self

    def write(self, ids: Iterable[int]) -> None:
        """One document. Those without a token are left out."""
        values = array(_ARRAYS[self.id_type], ids)
        if values:
            self.lengths.append(len(values))
            try:
                values.tofile(self._file)
            except OSError as error:
                raise self._cannot(error) from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._folder as folder:
            try:
                self._file.close()
                if kind is None:
                    index = Path(folder) / "idx"
                    index.write_bytes(self._index())
                    (Path(folder) / "bin").rename(self.data)
                    index.rename(self.index)
            except OSError as problem:
                raise self._cannot(problem) from None

    def _index(self) -> bytes:
        places = array("q", [0])
        for length in self.lengths:
            places.append(places[-1] + length * ID_BYTES[self.id_type])
        documents = array("q", range(len(self.lengths) + 1))
        header = HEADER.pack(1, TYPE_CODES[self.id_type], len(self.lengths), len(documents))
        return b"".join([MAGIC, header, self.lengths.tobytes(), places[:-1].tobytes(), documents.tobytes()])

    def _cannot(self, error: OSError) -> InvalidInputError:
        return InvalidInputError(
            f"cannot write {self.data}: {error.strerror}", "choose a folder with room that you may write to"
        )
