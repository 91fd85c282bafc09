"""A folder of Hugging Face weights: its config, and what its safetensors files say they hold. Imports no torch.

A safetensors file is 8 bytes with the length of a JSON header, the header, and the tensors one after the other.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeplan.errors import InvalidInputError
from moeplan.files import read_json
from moeplan.hf_config import model_from_hf_config
from moeplan.hf_export import model_differences
from moeplan.hf_layout import checkpoint_places
from moeplan.model_spec import ModelSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = ("F64", "F32", "F16", "BF16")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor: the file that holds it, its type as safetensors names it, its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HfFolder:
    """The model a folder says it holds, its family, and its tensors by name."""

    path: Path
    model: ModelSpec
    family: str
    tensors: dict[str, Stored]


def open_folder(path: Path) -> HfFolder:
    """Read config, index and headers. InvalidInputError for what is missing, cut short, quantized or of no family."""
    if not path.is_dir():
        raise InvalidInputError(
            f"{path} is not a folder of Hugging Face weights", "give a folder with config.json and safetensors files"
        )
    config: Any = read_json(path / "config.json")
    model = model_from_hf_config(config, str(path / "config.json"))
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise InvalidInputError(
            f"{path}: weights are quantized ({method}); F32, F16 and BF16 can be read", "convert them to BF16 first"
        )
    tensors: dict[str, Stored] = {}
    for file in _files(path):
        tensors |= _header(file)
    return HfFolder(path, model, str(config["model_type"]), tensors)


def _files(path: Path) -> list[Path]:
    """The folder's safetensors files, all that its index names."""
    index = path / INDEX
    if not index.is_file():
        if not (path / SINGLE).is_file():
            raise InvalidInputError(
                f"{path} has neither {INDEX} nor {SINGLE}", "save the weights as safetensors, as save_pretrained does"
            )
        return [path / SINGLE]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInputError(f"{index}: weight_map is missing or empty", "download the index again")
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (path / name).is_file()]:
        raise InvalidInputError(
            f"{path}: {missing[0]} is missing, which {INDEX} names ({len(missing)} of {len(names)} files missing)",
            "download the missing files",
        )
    return [path / name for name in names]


def _header(file: Path) -> dict[str, Stored]:
    """Tensors of one file, whose length must be what its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {name: Stored(file, one["dtype"], tuple(one["shape"])) for name, one in entries.items()}
        end = 8 + length + max((one["data_offsets"][1] for one in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise InvalidInputError(f"{file} is not a safetensors file, or is corrupt", "download it again") from None
    if size != end:
        raise InvalidInputError(f"{file} is corrupt: {size} bytes, where its header says {end}", "download it again")
    return tensors


def check_model(folder: HfFolder, model: ModelSpec) -> None:
    """Raise InvalidInputError unless the folder holds every weight of ``model``, each in its shape.

    The model may have fewer MTP depths than the folder says.
    """
    check_same_model(folder, model)
    check_tensors(folder, model)


def check_same_model(folder: HfFolder, model: ModelSpec) -> None:
    """Raise InvalidInputError unless the folder's config is of ``model``, but for further MTP depths."""
    differing = model_differences(model, folder.model)
    if model.num_mtp_layers < folder.model.num_mtp_layers:
        differing.remove("num_mtp_layers")
    if differing:
        raise InvalidInputError(
            f"{folder.path} holds another model: {_difference(differing[0], model, folder.model)}"
            + (f" ({len(differing) - 1} more differences)" if len(differing) > 1 else ""),
            f"make the plan for it: moeplan search --model {folder.path}",
        )


def check_tensors(folder: HfFolder, model: ModelSpec) -> None:
    """Raise InvalidInputError unless the folder's files hold every weight of ``model``, each in its shape."""
    for places in checkpoint_places(model, folder.family).values():
        found = folder.tensors.get(places[0].name)
        if found is None:
            raise InvalidInputError(
                f"{folder.path}: no file holds the tensor {places[0].name}",
                "the checkpoint is incomplete; get it again",
            )
        if found.shape != places[0].shape:
            raise InvalidInputError(
                f"{found.file}: {places[0].name} has shape {list(found.shape)}, the model has {list(places[0].shape)}",
                "config.json and weights are of different models",
            )
        if found.dtype not in DTYPES:
            raise InvalidInputError(
                f"{found.file}: {places[0].name} is of type {found.dtype}, allowed: {', '.join(DTYPES)}",
                "convert the weights to BF16 first",
            )


def _difference(key: str, model: ModelSpec, other: ModelSpec) -> str:
    return f"{key} is {_value(other, key)} there and {_value(model, key)} in the plan"


def _value(model: ModelSpec, key: str) -> object:
    value: Any = model
    for part in key.split("."):
        value = getattr(value, part, None)
    return value
