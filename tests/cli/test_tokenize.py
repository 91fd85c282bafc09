"""``moeplan tokenize``: what it writes is what ``run`` reads, and what it says of text it cannot use."""

import json
import struct
from pathlib import Path

import pytest
import torch

from moeplan.executor.data import FileTokens
from moeplan.executor.token_file import token_file
from tests.cli.conftest import Cli
from tests.cli.test_errors import assert_one_error

WORDS = {"<end>": 0, "a": 1, "b": 2, "c": 3, "<unk>": 4}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<end>"])
    folder = tmp_path / "hf"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def ids(prefix: Path) -> list[int]:
    found = token_file(str(prefix), "uint16")
    return FileTokens(found).read(0, found.num_tokens).tolist()


def test_text_as_bytes(cli: Cli, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("héllo", encoding="utf-8")
    outcome = cli("tokenize", str(text), "--tokenizer", "bytes", "--out", str(tmp_path / "new" / "data"), "--json")
    facts = json.loads(outcome.out)
    assert (facts["documents"], facts["tokens"], facts["id_type"], facts["vocab_size"]) == (1, 6, "uint8", 256)
    assert bytes(ids(tmp_path / "new" / "data")) == "héllo".encode()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["data.bin", "data.idx"]


def test_lines_of_json_by_a_tokenizer_with_a_token_at_their_end(cli: Cli, tokenizer: Path, tmp_path: Path) -> None:
    lines = tmp_path / "some.jsonl"
    lines.write_text('{"body": "a b"}\n\n{"body": "c"}\n', encoding="utf-8")
    out = tmp_path / "data"
    settings = ("--json-key", "body", "--end", "<end>", "--out", str(out))
    outcome = cli("tokenize", str(lines), "--tokenizer", str(tokenizer), *settings)
    assert outcome.code == 0
    assert "5 tokens in 2 documents" in outcome.out
    assert ids(out) == [1, 2, 0, 3, 0]
    index = out.with_suffix(".idx").read_bytes()[9:]
    assert struct.unpack("<QBQQ2i2q3q", index) == (1, 1, 2, 3, 3, 2, 0, 3, 0, 1, 2)


def test_large_vocabularies_have_wider_ids(tmp_path: Path) -> None:
    from moeplan.executor.token_writer import TokenWriter, id_type_of

    for vocab_size, largest in ((257, 256), (65499, 65498), (200_000, 199_999)):
        with TokenWriter(tmp_path / str(vocab_size), id_type_of(vocab_size)) as writer:
            writer.write([largest, 1])
        assert ids(tmp_path / str(vocab_size)) == [largest, 1]
    assert FileTokens(token_file(str(tmp_path / "257"), "uint8")).dtype == torch.uint16


def test_what_cannot_be_used_leaves_nothing(cli: Cli, tokenizer: Path, tmp_path: Path) -> None:
    bad, text, out = tmp_path / "bad.jsonl", tmp_path / "a.txt", tmp_path / "data"
    bad.write_text('{"text": "a"}\n{"text": 3}\n', encoding="utf-8")
    text.write_text("a", encoding="utf-8")
    for arguments, words in (
        ((bad, "--tokenizer", "bytes"), ("bad.jsonl: line 2", "text")),
        ((tmp_path / "none", "--tokenizer", "bytes"), ("file not found", "none")),
        ((text, "--tokenizer", tmp_path), ("tokenizer.json",)),
        ((text, "--tokenizer", text), ("a.txt cannot be read",)),
        ((text, "--tokenizer", tokenizer, "--end", "<eod>"), ("no token '<eod>'", "<end>")),
    ):
        outcome = cli("tokenize", *map(str, arguments), "--out", str(out))
        assert_one_error(outcome.code, outcome.err, *words)
    assert not list(tmp_path.glob("*data*"))
    assert cli("tokenize", str(text), "--tokenizer", "bytes", "--out", str(out)).code == 0
    outcome = cli("tokenize", str(text), "--tokenizer", "bytes", "--out", str(out))
    assert_one_error(outcome.code, outcome.err, "data.bin exists")
