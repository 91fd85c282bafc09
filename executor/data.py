"""Training tokens: a file of ids, or the standard library's sources as bytes.

Sequence s of step n is a pure function of (seed, n, s), so how ranks share the batch does not change the data.
Validation reads the end of the data, which training then never sees.
"""

import hashlib
import random
import sysconfig
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from moeplan.errors import InvalidInputError
from moeplan.executor.token_file import ID_BYTES, TokenFile, check_length, document_ends, num_held_out, run_files
from moeplan.plan import Plan
from moeplan.run_config import RunConfig

# Enough for a demonstration, small beside the process itself.
_SOURCE_BYTES = 4 * 2**20
# Four make a Feistel network of random functions a random permutation to whoever asks both ways (Luby and Rackoff).
_FEISTEL_ROUNDS = 4


class TokenIds(Protocol):
    """Token ids in storage order."""

    def __len__(self) -> int:
        """How many there are."""

    def read(self, start: int, count: int) -> Tensor:
        """``count`` ids (int64) from ``start`` on."""


class HeldTokens:
    """Ids held in memory."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, count: int) -> Tensor:
        return self.ids[start : start + count].to(torch.int64)


class FileTokens:
    """Ids read from a file as they are asked for.

    Not mapped into memory: of a file that another process cuts short, a mapping ends this one by SIGBUS.
    """

    def __init__(self, found: TokenFile) -> None:
        self.found, self.width_bytes = found, ID_BYTES[found.id_type]
        self.dtype: torch.dtype = getattr(torch, found.id_type)

    def __len__(self) -> int:
        return self.found.num_tokens

    def read(self, start: int, count: int) -> Tensor:
        wanted_bytes = count * self.width_bytes
        try:
            with self.found.path.open("rb") as file:
                file.seek(start * self.width_bytes)
                content = file.read(wanted_bytes)
        except OSError as error:
            raise InvalidInputError(
                f"data {self.found.path}: cannot be read: {error.strerror}", "check that you may read it"
            ) from None
        if len(content) < wanted_bytes:
            raise InvalidInputError(
                f"data {self.found.path}: ends before token {start + count}, had {self.found.num_tokens} at the start",
                "something cut it short while it was read: restore it, then go on with resume",
            )
        return torch.frombuffer(bytearray(content), dtype=self.dtype).to(torch.int64)


@dataclass(frozen=True)
class TokenSource(ABC):
    """Sequences of token ids: of every step, drawn by ``seed``, and held out for validation."""

    seq_len: int
    seed: int

    @abstractmethod
    def document(self, step: int, index: int, length: int) -> Tensor:
        """``length`` + 1 ids (int64): inputs and, one further, targets of document ``index`` of a step.

        Raises InvalidInputError where an id does not belong to the vocabulary.
        """

    @abstractmethod
    def validation_document(self, index: int, length: int, total: int) -> Tensor:
        """``length`` + 1 held-out ids of document ``index`` of ``total``; the same at every step."""

    @abstractmethod
    def ends(self, step: int, index: int) -> tuple[int, ...]:
        """After how many of its ``seq_len`` + 1 ids documents end inside :meth:`sequence`; none where nobody knows."""

    @abstractmethod
    def validation_ends(self, index: int, total: int) -> tuple[int, ...]:
        """As :meth:`ends`, of held-out sequence ``index`` of ``total``."""

    @abstractmethod
    def resumed(self, step: int, num_tokens: int) -> "TokenSource":
        """The source of a run that goes on after ``step`` steps of ``num_tokens``, whatever batches they had."""

    def sequence(self, step: int, index: int) -> Tensor:
        """:meth:`document` of the length of a sequence."""
        return self.document(step, index, self.seq_len)

    def batch(self, step: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of sequences ``first`` to ``first + count``, one after the other, each [count * S]."""
        return _stacked(self.sequence(step, index) for index in range(first, first + count))

    def validation_batch(self, first: int, count: int, total: int) -> tuple[Tensor, Tensor]:
        """As :meth:`batch`, of ``total`` sequences of what is held out; the same at every step."""
        return _stacked(self.validation_document(index, self.seq_len, total) for index in range(first, first + count))


@dataclass(frozen=True)
class StreamSource(TokenSource):
    """Sequences of one stream of ids, the last ``num_held_out`` for validation; ``name`` is how messages call it.

    ``batch_size``: sequences of a step where each place is taken once before any comes again; 0 where a sequence may
    begin anywhere at any time. ``num_before``: sequences by which those before a checkpoint were more.
    ``document_ends``: where documents end, for runs that keep them apart.
    """

    name: str
    tokens: TokenIds
    vocab_size: int
    num_held_out: int = 0
    batch_size: int = 0
    num_before: int = 0
    document_ends: Sequence[int] = field(default=(), repr=False, compare=False)

    def document(self, step: int, index: int, length: int) -> Tensor:
        return self._ids_at(self._start(step, index, length), length)

    def _start(self, step: int, index: int, length: int) -> int:
        room = len(self.tokens) - self.num_held_out - length
        if not self.batch_size:
            return random.Random(f"{self.seed}/{step}/{index}").randrange(room)
        places = (room - 1) // length + 1
        turn, place = divmod(self.num_before + step * self.batch_size + index, places)
        return permuted(place, places, f"{self.seed}/{turn}") * length

    def ends(self, step: int, index: int) -> tuple[int, ...]:
        return self._ends_from(self._start(step, index, self.seq_len))

    def resumed(self, step: int, num_tokens: int) -> TokenSource:
        return replace(self, num_before=num_tokens // self.seq_len - step * self.batch_size)

    def validation_document(self, index: int, length: int, total: int) -> Tensor:
        """Spread evenly over what is held out."""
        return self._ids_at(self._validation_start(index, length, total), length)

    def _validation_start(self, index: int, length: int, total: int) -> int:
        room = self.num_held_out - length - 1
        return len(self.tokens) - self.num_held_out + room * index // max(1, total - 1)

    def validation_ends(self, index: int, total: int) -> tuple[int, ...]:
        return self._ends_from(self._validation_start(index, self.seq_len, total))

    def _ends_from(self, start: int) -> tuple[int, ...]:
        first, end = (bisect_right(self.document_ends, place) for place in (start, start + self.seq_len))
        return tuple(sorted({end - start for end in self.document_ends[first:end]}))  # some documents are empty

    def _ids_at(self, start: int, length: int) -> Tensor:
        ids = self.tokens.read(start, length + 1)
        is_foreign = (ids < 0) | (ids >= self.vocab_size)
        if bool(is_foreign.any()):
            place = int(is_foreign.nonzero()[0])
            raise InvalidInputError(
                f"data {self.name}: token id {int(ids[place])} at position {start + place}, "
                f"allowed: below the model's vocab_size {self.vocab_size}",
                "check data_dtype, tokenize with the model's vocabulary, or choose a model with a larger one",
            )
        return ids


@dataclass(frozen=True)
class MixedSource(TokenSource):
    """Documents of several sources, drawn by ``weights``; those for validation may have sources of their own."""

    parts: tuple[TokenSource, ...]
    weights: tuple[float, ...]
    validation: TokenSource | None

    def document(self, step: int, index: int, length: int) -> Tensor:
        return self._drawn(f"{self.seed}/{step}/{index}/mix").document(step, index, length)

    def validation_document(self, index: int, length: int, total: int) -> Tensor:
        return self._validation_source(index).validation_document(index, length, total)

    def ends(self, step: int, index: int) -> tuple[int, ...]:
        return self._drawn(f"{self.seed}/{step}/{index}/mix").ends(step, index)

    def validation_ends(self, index: int, total: int) -> tuple[int, ...]:
        return self._validation_source(index).validation_ends(index, total)

    def _validation_source(self, index: int) -> TokenSource:
        return self.validation or self._drawn(f"{self.seed}/{index}/validation")

    def resumed(self, step: int, num_tokens: int) -> TokenSource:
        return replace(self, parts=tuple(part.resumed(step, num_tokens) for part in self.parts))

    def _drawn(self, key: str) -> TokenSource:
        return random.Random(key).choices(self.parts, self.weights)[0]


def permuted(index: int, size: int, key: str) -> int:
    """Where a permutation of ``range(size)``, drawn by ``key``, takes ``index``.

    A Feistel network over the next even power of two, walked along until inside: nothing as long as the data is held.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = index >> half, index & ((1 << half) - 1)
        for turn in range(_FEISTEL_ROUNDS):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest) & ((1 << half) - 1))
        index = left << half | right
        if index < size:
            return index


def open_tokens(plan: Plan, run: RunConfig) -> TokenSource:
    """The data of a run. Raises InvalidInputError for a file that is missing, unreadable or too short."""
    files, validation_file = run_files(run, plan.seq_len)
    batch_size = plan.global_batch_size if run.data_order == "shuffled" else 0

    def opened(found: TokenFile | None, *, is_held_out: bool = False) -> StreamSource:
        name, tokens = ("standard library sources", cast("TokenIds", HeldTokens(_library_tokens())))
        if found is not None:
            name, tokens = str(found.path), FileTokens(found)
        else:
            check_length(name, len(tokens), run, plan.seq_len)
        held_out = len(tokens) if is_held_out else num_held_out(len(tokens), run, plan.seq_len)
        ends = document_ends(found) if found is not None and run.separate_documents else ()
        source = StreamSource(plan.seq_len, run.seed, name, tokens, plan.model.vocab_size, held_out, batch_size)
        return replace(source, document_ends=ends)

    parts = [opened(found) for found, _ in files] or [opened(None)]
    validation = opened(validation_file, is_held_out=True) if validation_file is not None else None
    if len(parts) == 1 and validation is None:
        return parts[0]
    weights = tuple(weight for _, weight in files) or (1.0,)
    return MixedSource(plan.seq_len, run.seed, tuple(parts), weights, validation)


def _stacked(sequences: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    ids = torch.stack(list(sequences))
    return ids[:, :-1].flatten(), ids[:, 1:].flatten()


def _library_tokens() -> Tensor:
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _SOURCE_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)
