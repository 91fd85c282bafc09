"""Reading and writing the files users own: TOML and JSON in, whole files out or none at all."""

import json
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from moeplan.errors import InvalidInputError, nearest_names

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_text(path: Path, *, errors: Literal["strict", "replace"] = "strict") -> str:
    """The text of a file, without a byte order mark, or InvalidInputError naming it; ``errors`` as for ``open``."""
    try:
        return path.read_text(encoding="utf-8-sig", errors=errors)
    except FileNotFoundError:
        raise InvalidInputError(f"file not found: {path}", "check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"cannot read {path}: {error}", "check that it is a readable text file") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file; a truncated or malformed one raises InvalidInputError with line and column."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(
            f"{path} is not valid TOML: {error}", "the file may be truncated; write it again"
        ) from None


def read_json(path: Path) -> Any:
    """The value of a JSON file; a malformed one raises InvalidInputError with line and column."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"{path} is not valid JSON: {error}", "the file may be truncated; write it again"
        ) from None


def validate(model_type: type[ModelT], data: Any, where: str) -> ModelT:
    """``data`` as a ``model_type``; the first problem becomes one line with key path, value and what is allowed."""
    try:
        return model_type.model_validate(data)
    except ValidationError as error:
        problems = error.errors()
        # A key that nobody knows is most often why another is missing.
        first = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
        key = "".join(f"{part}: " for part in [".".join(str(part) for part in first["loc"])] if part)
        silent = first["type"] in ("missing", "extra_forbidden") or isinstance(
            first.get("input"), dict | list | BaseModel
        )
        got = "" if silent else f", got {short(first.get('input'))}"
        more = f" ({len(problems) - 1} more problems)" if len(problems) > 1 else ""
        message, hint = first["msg"].removeprefix("Value error, "), "correct that key and try again"
        if first["type"] == "extra_forbidden":
            known = _keys_beside(model_type, first["loc"])
            message, hint = "no such key", nearest_names(str(first["loc"][-1]), known) if known else hint
        raise InvalidInputError(f"{where}: {key}{message}{got}{more}", hint) from None


def _keys_beside(model_type: Any, path: tuple[int | str, ...]) -> tuple[str, ...]:
    """Keys of the table that a key was found in; none where it may be one of several tables."""
    for part in path[:-1]:
        field = model_type.model_fields.get(part)
        named = (field.annotation, *get_args(field.annotation)) if field is not None else ()
        tables = [one for one in named if isinstance(one, type) and issubclass(one, BaseModel)]
        if len(tables) != 1:
            return ()
        model_type = tables[0]
    return tuple(model_type.model_fields)


def short(value: Any) -> str:
    """A value quoted for a message, as far as one line holds it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def toml_text(record: BaseModel) -> str:
    """A record as TOML; empty optional values are left out, since TOML has no null."""
    return tomli_w.dumps(record.model_dump(mode="json", exclude_none=True))


def check_writable(path: Path) -> None:
    """Raise InvalidInputError now if ``path`` could not be written, so that no work is lost to a bad path later."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "it is a directory")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from None


def write_text_atomically(path: Path, text: str) -> None:
    """Write under a temporary name beside ``path`` and rename: readers see the old file or the new, never half."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """As :func:`write_text_atomically`, for bytes. Raises InvalidInputError where the folder cannot be written."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> InvalidInputError:
    return InvalidInputError(
        f"cannot write {path}: {error.strerror}", "choose a folder with room that you may write to"
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
