"""Files are read with one clear error and written whole or not at all."""

from pathlib import Path

import pytest

from moeplan.errors import InvalidInputError, nearest_names
from moeplan.files import read_json, read_toml, validate, write_text_atomically
from moeplan.model_spec import ModelSpec
from moeplan.run_config import RunConfig


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


@pytest.mark.parametrize(
    "table, message, hint",
    [
        ({"step": 3}, "x.toml: step: no such key", "did you mean steps"),
        ({"steps": 0, "sead": 1}, "x.toml: sead: no such key (1 more problems)", "did you mean seed"),
        ({"zzz": 1}, "x.toml: zzz: no such key", "known: adam_beta1, "),
    ],
)
def test_an_unknown_key_is_told_first_with_those_like_it(table: dict[str, int], message: str, hint: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        validate(RunConfig, table, "x.toml")
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)


def test_a_key_inside_a_table_has_those_of_that_table() -> None:
    model = {"name": "m", "moe": {"num_experts": 4, "top_k": 2, "expert_fn_size": 8}}
    with pytest.raises(InvalidInputError, match=r"moe\.expert_fn_size: no such key") as caught:
        validate(ModelSpec, model, "m.toml")
    assert "expert_ffn_size" in caught.value.hint
