"""``moeplan tokenize``: text or JSON lines become the token file of a run."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import Progress

from moeplan.errors import InvalidInputError, nearest_names
from moeplan.files import read_text, short
from moeplan.report.output import err_console, out_console, print_json

BYTES = "bytes"
_BATCH_DOCUMENTS = 256  # of which the tokenizer takes several at once
_JSON_LINES = (".jsonl", ".ndjson")

Encode = Callable[[list[str]], Iterable[list[int]]]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """``encode`` gives the ids of each of some documents; ``vocab_size`` is one more than the largest id."""

    encode: Encode
    vocab_size: int


def run_tokenize(files: list[Path], name: str, out: Path, json_key: str, end: str, *, as_json: bool) -> None:
    """Write ``out``.bin and ``out``.idx; each line of a JSON lines file is a document, other files are one each."""
    from moeplan.executor.token_writer import TokenWriter, id_type_of

    tokenizer = _tokenizer(name, end)
    for file in files:
        if not file.is_file():
            raise InvalidInputError(f"file not found: {file}", "check the path")
    num_bytes = sum(file.stat().st_size for file in files)
    writer = TokenWriter(out, id_type_of(tokenizer.vocab_size))
    with Progress(console=err_console(), transient=True) as progress, writer:
        task = progress.add_task("tokenizing", total=num_bytes)
        documents = (document for file in files for document in _documents(file, json_key))
        for batch in _batches(documents):
            for ids in tokenizer.encode(batch):
                writer.write(ids)
            progress.advance(task, sum(map(len, batch)))
        if not writer.lengths:
            raise InvalidInputError("no document has a token", "give files with text")
    facts = {
        "files": [str(writer.data), str(writer.index)],
        "documents": len(writer.lengths),
        "tokens": sum(writer.lengths),
        "id_type": writer.id_type,
        "vocab_size": tokenizer.vocab_size,
    }
    if as_json:
        print_json(facts)
        return
    out_console().print(
        f"wrote {writer.data} and {writer.index}: {facts['tokens']} tokens in {facts['documents']} documents, ids of "
        f"{writer.id_type}\ntrain on it with --data {out} and a model with a vocab_size of at least "
        f"{tokenizer.vocab_size}"
    )


def _tokenizer(name: str, end: str) -> Tokenizer:
    """``bytes``, or what the tokenizer.json of a Hugging Face folder says; ``end`` goes after each document."""
    if name == BYTES:
        if end:
            raise InvalidInputError(f"end: got {end!r}, bytes have no token of that name", "leave --end out")
        return Tokenizer(lambda texts: [list(text.encode()) for text in texts], 256)
    try:
        from tokenizers import Tokenizer as HfTokenizer
    except ImportError:
        raise InvalidInputError("tokenizer: package tokenizers is not installed", "pip install tokenizers") from None
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise InvalidInputError(
            f"tokenizer: file not found: {path}", f"give a folder with tokenizer.json, that file, or {BYTES}"
        )
    try:
        model = HfTokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the package raises Exception itself
        raise InvalidInputError(f"tokenizer: {path} cannot be read: {error}", "it may be truncated") from None
    vocab = model.get_vocab(with_added_tokens=True)
    if end and end not in vocab:
        known = [token.content for token in model.get_added_tokens_decoder().values()]
        raise InvalidInputError(f"end: {path} has no token {end!r}", nearest_names(end, known))
    last = [vocab[end]] if end else []

    def encode(texts: list[str]) -> Iterator[list[int]]:
        for encoding in model.encode_batch(texts, add_special_tokens=False):
            yield [*encoding.ids, *last]

    return Tokenizer(encode, max(vocab.values()) + 1)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(documents)
    while batch := list(islice(rest, _BATCH_DOCUMENTS)):
        yield batch


def _documents(file: Path, json_key: str) -> Iterator[str]:
    if file.suffix not in _JSON_LINES:
        yield read_text(file)
        return
    number = 1
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for line in lines:
                if line.strip():
                    yield _text(json.loads(line), json_key)
                number += 1
    except (ValueError, TypeError) as error:
        raise InvalidInputError(
            f"{file}: line {number}: {error}", f"each line must be a JSON object with the text under {json_key!r}"
        ) from None


def _text(value: Any, key: str) -> str:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, str):
        raise TypeError(f"no text under {key!r}: {short(value)}")
    return found
