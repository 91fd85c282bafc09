"""A folder of Hugging Face weights: its config, and what its safetensors files say they hold. Imports no torch.

A safetensors file is 8 bytes with the length of a JSON header, the header, and the tensors one after the other.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeplan import hf_qwen3_next
from moeplan.errors import InvalidInputError
from moeplan.files import read_json
from moeplan.hf_config import model_from_hf_config
from moeplan.hf_export import model_differences
from moeplan.hf_layout import checkpoint_places
from moeplan.model_spec import ModelSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = ("F64", "F32", "F16", "BF16")
# Endings of the tensors that a quantized one comes with: factors of blocks of FP8 values; MXFP4 bytes and exponents.
FP8_FACTORS = "_scale_inv"
MXFP4_BYTES, MXFP4_EXPONENTS = "_blocks", "_scales"
MXFP4_BLOCK = 32
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor: the file that holds it, its type as safetensors names it, its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HfFolder:
    """The model a folder says it holds, its family, its tensors by name; ``fp8_block``: rows and columns a factor."""

    path: Path
    model: ModelSpec
    family: str
    tensors: dict[str, Stored]
    fp8_block: tuple[int, int] = (0, 0)

    def is_mxfp4(self, name: str) -> bool:
        """Whether the tensor ``name`` is stored as bytes of two 4-bit values."""
        return name not in self.tensors and name + MXFP4_BYTES in self.tensors


def open_folder(path: Path) -> HfFolder:
    """Read config, index and headers. InvalidInputError for what is missing, cut short, quantized or of no family."""
    if not path.is_dir():
        raise InvalidInputError(
            f"{path} is not a folder of Hugging Face weights", "give a folder with config.json and safetensors files"
        )
    config: Any = read_json(path / "config.json")
    model = model_from_hf_config(config, str(path / "config.json"))
    fp8_block = _fp8_block(path, config.get("quantization_config"))
    tensors: dict[str, Stored] = {}
    for file in _files(path):
        tensors |= _header(file)
    family = str(config["model_type"])
    if family in hf_qwen3_next.FAMILIES and hf_qwen3_next.MTP_PROJECTION in tensors:
        model = model.model_copy(update={"num_mtp_layers": 1})  # of which published configs say nothing
    return HfFolder(path, model, family, tensors, fp8_block)


def _fp8_block(path: Path, quantization: Any) -> tuple[int, int]:
    """Rows and columns of a block of FP8 values, zero where there are none."""
    if not quantization:
        return 0, 0
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
    if method == "mxfp4":
        return 0, 0
    block = quantization.get("weight_block_size") if method == "fp8" else None
    if not (isinstance(block, list) and [type(size) for size in block] == [int, int] and min(block) > 0):
        raise InvalidInputError(
            f"{path}: weights are quantized ({method}); FP8 in blocks, MXFP4 and unquantized ones can be read",
            "convert them to BF16 first",
        )
    return block[0], block[1]


def _files(path: Path) -> list[Path]:
    """The folder's safetensors files, all that its index names."""
    index = path / INDEX
    if not index.is_file():
        if not (path / SINGLE).is_file():
            raise InvalidInputError(
                f"{path} has neither {INDEX} nor {SINGLE}", "save the weights as safetensors, as save_pretrained does"
            )
        return [path / SINGLE]
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
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
    for places in checkpoint_places(model, folder.family, folder.tensors).values():
        name, shape = places[0].name, places[0].shape
        if folder.is_mxfp4(name):
            num_blocks = shape[1] // MXFP4_BLOCK
            _check_tensor(folder, name + MXFP4_BYTES, (shape[0], shape[2], num_blocks, MXFP4_BLOCK // 2), ("U8",))
            _check_tensor(folder, name + MXFP4_EXPONENTS, (shape[0], shape[2], num_blocks), ("U8",))
            continue
        _check_tensor(folder, name, shape, (*DTYPES, "F8_E4M3") if folder.fp8_block[0] else DTYPES)
        if folder.tensors[name].dtype == "F8_E4M3":
            blocks = tuple(-(-size // block) for size, block in zip(shape, folder.fp8_block, strict=True))
            _check_tensor(folder, name + FP8_FACTORS, blocks, DTYPES)


def _check_tensor(folder: HfFolder, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    found = folder.tensors.get(name)
    if found is None:
        raise InvalidInputError(
            f"{folder.path}: no file holds the tensor {name}", "the checkpoint is incomplete; get it again"
        )
    if found.shape != shape:
        raise InvalidInputError(
            f"{found.file}: {name} has shape {list(found.shape)}, the model has {list(shape)}",
            "config.json and weights are of different models",
        )
    if found.dtype not in dtypes:
        raise InvalidInputError(
            f"{found.file}: {name} is of type {found.dtype}, allowed: {', '.join(dtypes)}",
            "convert the weights to BF16 first",
        )


def _difference(key: str, model: ModelSpec, other: ModelSpec) -> str:
    return f"{key} is {_value(other, key)} there and {_value(model, key)} in the plan"


def _value(model: ModelSpec, key: str) -> object:
    value: Any = model
    for part in key.split("."):
        value = getattr(value, part, None)
    return value
