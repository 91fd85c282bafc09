"""Training tokens: a flat file of ids, or the standard library's sources as bytes.

Sequence s of step n is a pure function of (seed, n, s), so how ranks share the batch does not change the data.
"""

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moeplan.errors import InvalidInputError
from moeplan.executor.check import check_data_file
from moeplan.plan import Plan
from moeplan.run_config import RunConfig

_DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32}
# Enough for a demonstration, small beside the process itself.
_SOURCE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class TokenSource:
    """Token ids in storage order; ``name`` is how messages call them."""

    name: str
    tokens: Tensor
    vocab_size: int
    seq_len: int
    seed: int

    def sequence(self, step: int, index: int) -> Tensor:
        """``seq_len`` + 1 ids (int64): inputs and, one further, targets of sequence ``index`` of the step's batch.

        Raises InvalidInputError where an id does not belong to the vocabulary.
        """
        draw = random.Random(f"{self.seed}/{step}/{index}")
        start = draw.randrange(len(self.tokens) - self.seq_len)
        ids = self.tokens[start : start + self.seq_len + 1].to(torch.int64)
        if int(ids.max()) >= self.vocab_size:
            place = int((ids >= self.vocab_size).nonzero()[0])
            raise InvalidInputError(
                f"data {self.name}: token id {int(ids[place])} at position {start + place}, "
                f"allowed: below the model's vocab_size {self.vocab_size}",
                "check data_dtype, tokenize with the model's vocabulary, or choose a model with a larger one",
            )
        return ids

    def batch(self, step: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of sequences ``first`` to ``first + count``, one after the other, each [count * S]."""
        ids = torch.stack([self.sequence(step, index) for index in range(first, first + count)])
        return ids[:, :-1].flatten(), ids[:, 1:].flatten()


def open_tokens(plan: Plan, run: RunConfig) -> TokenSource:
    """The data of a run. Raises InvalidInputError for a file that is missing, unreadable or too short."""
    check_data_file(run, plan.seq_len)
    name = run.data or "standard library sources"
    tokens = _file_tokens(Path(run.data), _DTYPES[run.data_dtype]) if run.data else _library_tokens()
    return TokenSource(name, tokens, plan.model.vocab_size, plan.seq_len, run.seed)


def _file_tokens(path: Path, dtype: torch.dtype) -> Tensor:
    """The file mapped into memory, so that each rank reads only the pages of its own sequences."""
    try:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size // dtype.itemsize, dtype=dtype)
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        raise InvalidInputError(f"data {path}: cannot be read: {first_line}", "check that you may read it") from None


def _library_tokens() -> Tensor:
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _SOURCE_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)
