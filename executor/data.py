"""Training tokens: a file of ids, or the standard library's sources as bytes.

Sequence s of step n is a pure function of (seed, n, s), so how ranks share the batch does not change the data.
Validation reads the end of the data, which training then never sees.
"""

import random
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from moeplan.errors import InvalidInputError
from moeplan.executor.token_file import ID_BYTES, TokenFile, check_length, num_held_out, token_file
from moeplan.plan import Plan
from moeplan.run_config import RunConfig

# Enough for a demonstration, small beside the process itself.
_SOURCE_BYTES = 4 * 2**20


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
class TokenSource:
    """Sequences of token ids, the last ``num_held_out`` ids for validation; ``name`` is how messages call them."""

    name: str
    tokens: TokenIds
    vocab_size: int
    seq_len: int
    seed: int
    num_held_out: int = 0

    def sequence(self, step: int, index: int) -> Tensor:
        """``seq_len`` + 1 ids (int64): inputs and, one further, targets of sequence ``index`` of the step's batch.

        Raises InvalidInputError where an id does not belong to the vocabulary.
        """
        draw = random.Random(f"{self.seed}/{step}/{index}")
        return self._ids_at(draw.randrange(len(self.tokens) - self.num_held_out - self.seq_len))

    def batch(self, step: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of sequences ``first`` to ``first + count``, one after the other, each [count * S]."""
        return _stacked(self.sequence(step, index) for index in range(first, first + count))

    def validation_batch(self, first: int, count: int, total: int) -> tuple[Tensor, Tensor]:
        """As :meth:`batch`, of ``total`` sequences spread evenly over what is held out; the same at every step."""
        begin = len(self.tokens) - self.num_held_out
        room = self.num_held_out - self.seq_len - 1
        return _stacked(
            self._ids_at(begin + room * index // max(1, total - 1)) for index in range(first, first + count)
        )

    def _ids_at(self, start: int) -> Tensor:
        ids = self.tokens.read(start, self.seq_len + 1)
        is_foreign = (ids < 0) | (ids >= self.vocab_size)
        if bool(is_foreign.any()):
            place = int(is_foreign.nonzero()[0])
            raise InvalidInputError(
                f"data {self.name}: token id {int(ids[place])} at position {start + place}, "
                f"allowed: below the model's vocab_size {self.vocab_size}",
                "check data_dtype, tokenize with the model's vocabulary, or choose a model with a larger one",
            )
        return ids


def open_tokens(plan: Plan, run: RunConfig) -> TokenSource:
    """The data of a run. Raises InvalidInputError for a file that is missing, unreadable or too short."""
    if run.data:
        found = token_file(run.data, run.data_dtype)
        name, tokens = str(found.path), cast("TokenIds", FileTokens(found))
    else:
        name, tokens = "standard library sources", HeldTokens(_library_tokens())
    check_length(name, len(tokens), run, plan.seq_len)
    held_out = num_held_out(len(tokens), run, plan.seq_len)
    return TokenSource(name, tokens, plan.model.vocab_size, plan.seq_len, run.seed, held_out)


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
