"""Files are read with one clear error and written whole or not at all."""

from pathlib import Path

import pytest

from moeplan.errors import InvalidInputError, nearest_names
from moeplan.files import read_json, read_toml, write_text_atomically


def test_truncated_files_are_one_error_naming_them(tmp_path: Path) -> None:
    for reader, name, text in ((read_toml, "plan.toml", 'name = "x'), (read_json, "result.json", '{"a": 1')):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(InvalidInputError, match=name):
            reader(path)
        with pytest.raises(InvalidInputError, match="not found"):
            reader(tmp_path / "missing")


def test_a_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.toml"
    write_text_atomically(path, "old")
    write_text_atomically(path, "new")
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("old")

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(InvalidInputError, match="No space left"):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_nearest_names() -> None:
    assert "gb300" in nearest_names("gb30", ["gb300", "h100"])
    assert nearest_names("zzz", ["gb300", "h100"]) == "known: gb300, h100"
