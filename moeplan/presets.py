"""Models by name: the presets of ``moeplan/models``, a TOML file of one's own, or a Hugging Face ``config.json``."""

from pathlib import Path

from moeplan.errors import InvalidInputError, nearest_names
from moeplan.files import read_json, read_toml, validate
from moeplan.hf_config import model_from_hf_config
from moeplan.model_spec import ModelSpec

PRESET_FOLDER = Path(__file__).parent / "models"


def model_names() -> tuple[str, ...]:
    """Names of the presets, sorted."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in PRESET_FOLDER.glob("*.toml")))


def load_model(name_or_path: str) -> ModelSpec:
    """The model of that preset name (any case), or of that ``.toml``, ``config.json`` or folder holding one.

    A preset wins over a file of the same name. Raises InvalidInputError for anything else.
    """
    name, path = name_or_path.lower(), Path(name_or_path)
    exists, is_folder = _look(path)
    if name in model_names():
        path = PRESET_FOLDER / f"{name}.toml"
    elif is_folder:
        path = _config_inside(path)
    elif not exists and path.suffix not in (".toml", ".json"):
        raise InvalidInputError(
            f"unknown model {name_or_path[:100]!r}: neither a preset nor a file", nearest_names(name, model_names())
        )
    if path.suffix == ".toml":
        return validate(ModelSpec, read_toml(path), str(path))
    if path.suffix == ".json":
        return model_from_hf_config(read_json(path), str(path))
    raise InvalidInputError(
        f"cannot read a model from {path}: its name ends in {path.suffix!r}",
        "give a preset name, a .toml file, or a Hugging Face config.json",
    )


def _look(path: Path) -> tuple[bool, bool]:
    """Whether something is there, and whether it is a folder; neither for what is too long to be a path."""
    try:
        return path.exists(), path.is_dir()
    except OSError:
        return False, False


def _config_inside(folder: Path) -> Path:
    config = folder / "config.json"
    if not config.is_file():
        raise InvalidInputError(
            f"no config.json in the folder {folder}", "give the folder of a Hugging Face checkpoint, or a preset name"
        )
    return config
