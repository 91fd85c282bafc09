"""First weights from a folder of Hugging Face safetensors: each rank reads the parts that it holds, and no more."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeplan.errors import InvalidInputError
from moeplan.executor.dequantize_hf import BlockFp8Slices, Mxfp4Slices
from moeplan.executor.dtypes import at_least_fp32
from moeplan.executor.parameters import Piece
from moeplan.hf_folder import FP8_FACTORS, MXFP4_BYTES, MXFP4_EXPONENTS, HfFolder
from moeplan.hf_layout import checkpoint_places
from moeplan.hf_place import Place


class HfWeights:
    """Gives the parts of whole weights that pieces ask for, read from the files of ``folder`` (see WeightSource)."""

    def __init__(self, folder: HfFolder) -> None:
        self._folder = folder
        self._places = checkpoint_places(folder.model, folder.family, folder.tensors)
        self._files: dict[Path, Any] = {}

    def __call__(self, piece: Piece) -> Tensor:
        place = self._places[piece.name][0]
        return read_part(self._slices(place.name), place, piece.source)

    def _slices(self, name: str) -> Any:
        """What reads slices of the tensor ``name``, quantized or not."""
        if self._folder.is_mxfp4(name):
            return Mxfp4Slices(self._stored(name + MXFP4_BYTES), self._stored(name + MXFP4_EXPONENTS))
        if self._folder.tensors[name].dtype == "F8_E4M3":
            return BlockFp8Slices(self._stored(name), self._stored(name + FP8_FACTORS), self._folder.fp8_block)
        return self._stored(name)

    def _stored(self, name: str) -> Any:
        """What reads slices of a tensor as it is stored. Files stay open: they are mapped, not read."""
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - a run without import need not have it

        file = self._folder.tensors[name].file
        try:
            if file not in self._files:
                self._files[file] = safe_open(file, framework="pt")
            return self._files[file].get_slice(name)
        except (OSError, SafetensorError) as error:
            raise InvalidInputError(
                f"{file}: cannot be read: {error}", "it may be corrupt; download it again"
            ) from None


def read_part(slices: Any, place: Place, source: tuple[slice, ...]) -> Tensor:
    """The part ``source`` of our weight from the tensor that ``slices`` reads, of which no more is read than needed."""
    rows = None
    if place.rows is not None:
        rows = torch.tensor([place.rows.theirs(row) for row in range(source[0].start, source[0].stop)])
        source = (slice(int(rows.min()), int(rows.max()) + 1), *source[1:])
    elif place.transposed:
        source = source[::-1]
    part: Tensor = _read(slices, place.index, source)
    if place.plus:
        part = part.to(at_least_fp32(part.dtype)) + place.plus
    if rows is not None:
        return part[rows - source[0].start]
    return part.t() if place.transposed else part


def _read(slices: Any, index: tuple[int | slice, ...], source: tuple[slice, ...]) -> Tensor:
    """``tensor[index][source]``; a step in ``index`` is read whole and thinned out."""
    ranges, thin, dims = list[slice](), list[int | slice](), iter(source)
    for one in index:
        if isinstance(one, int):
            ranges.append(slice(one, one + 1))
            thin.append(0)
            continue
        first, step, box = one.start or 0, one.step or 1, next(dims)
        ranges.append(slice(first + step * box.start, first + step * (box.stop - 1) + 1))
        thin.append(slice(None, None, step))
    part: Tensor = slices[(*ranges, *dims)]
    return part[tuple(thin)] if thin else part
