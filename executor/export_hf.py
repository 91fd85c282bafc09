"""The trained model as a Hugging Face folder: ``config.json`` and sharded safetensors with their index.

Each tensor of the checkpoint is put together on one of the ranks that hold parts of it, and every rank writes its own
files, so that none ever holds more than one file's worth. The folder must be one that all ranks see.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeplan.executor.collectives import gather_objects
from moeplan.executor.flat_buffer import Span
from moeplan.executor.mesh import Mesh
from moeplan.executor.model import Transformer
from moeplan.executor.optimizer import ChainedOptimizer
from moeplan.executor.tensor_slices import TensorSlice, buffer_slices
from moeplan.files import write_bytes_atomically, write_text_atomically
from moeplan.hf_export import hf_config_of
from moeplan.hf_folder import INDEX, SINGLE
from moeplan.hf_layout import checkpoint_places
from moeplan.hf_place import Place
from moeplan.plan import Plan
from moeplan.units import GIB

# Bytes of a file: what a rank holds in memory at once.
MAX_FILE_BYTES = 2 * GIB
# Of files that a tokenizer may need: tokenizer.json, merges.txt, tokenizer.model, chat_template.jinja.
_TEXT_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
_DTYPES = {"fp64": "float64", "fp32": "float32"}

# Which part of a whole weight: its first elements and its size along each dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _Part:
    """A part of one of our weights inside a tensor of the checkpoint, and the ranks that hold it."""

    weight: str
    place: Place
    box: Box
    ranks: tuple[int, ...]

    def sender(self, owner: int) -> int:
        """The rank that brings it to the tensor's owner, the owner itself where it can."""
        return owner if owner in self.ranks else self.ranks[0]


def export_hf(
    plan: Plan,
    mesh: Mesh,
    model: Transformer,
    folder: Path,
    *,
    weights: Iterable[TensorSlice] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the weights in their compute dtype; every rank writes a part. Collective over the world.

    ``weights`` are those that this rank holds, where its parameters are not (full sharding). InvalidInputError where no
    family holds the model or the folder cannot be written.
    """
    config = hf_config_of(plan.model) | {"torch_dtype": _DTYPES.get(plan.precision, "bfloat16")}
    own: dict[str, dict[Box, Tensor]] = defaultdict(dict)
    for one in (*(_parameter_slices(model) if weights is None else weights), *_bias_slices(model)):
        own[one.name][one.offsets, tuple(one.values.shape)] = one.values.detach()
    holders = _holders(own, mesh)
    writer = _Writer(folder, mesh, max_file_bytes)
    loads = [0] * mesh.world.size
    for name, parts in sorted(_tensors(plan, config["model_type"], holders).items()):
        owner = min({rank for part in parts for rank in part.ranks}, key=lambda rank: (loads[rank], rank))
        loads[owner] += _numel(parts[0].place.shape)
        tensor = _assembled(parts, own, owner, mesh, model.table.device)
        if tensor is not None:
            writer.add(name, tensor)
    writer.finish(config)


def export_trained(plan: Plan, mesh: Mesh, model: Transformer, optimizer: ChainedOptimizer, folder: Path) -> None:
    """:func:`export_hf` after training: what this rank updates where parameters have no storage between uses."""
    in_parts = plan.sharding == "full" or plan.fp8_primary_weights
    export_hf(plan, mesh, model, folder, weights=sharded_weights(optimizer) if in_parts else None)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Take along what else lies beside the first weights: tokenizer, chat template, generation settings."""
    for path in sorted(source.iterdir()):
        if path.is_file() and (path.suffix in _TEXT_SUFFIXES and path.name not in {"config.json", INDEX}):
            write_bytes_atomically(folder / path.name, path.read_bytes())


def sharded_weights(optimizer: ChainedOptimizer) -> Iterator[TensorSlice]:
    """The parts of weights that this rank updates, in the compute type.

    Under full sharding they are all that it holds, and of FP8 primary weights they are rounded from the main ones.
    """
    for one in optimizer.classes:
        updated, buffer = one.buffer.updated, one.buffer
        weights = buffer.updated_weights.to(buffer.weights.dtype)
        yield from buffer_slices(buffer, updated.overlap(Span(0, buffer.num_elements)), weights, updated.start)


def _parameter_slices(model: Transformer) -> Iterator[TensorSlice]:
    for entry in model.table.entries:
        for piece in entry.pieces:
            sizes = [one.stop - one.start for one in piece.source]
            values = entry.parameter.detach()[piece.target].reshape(sizes)
            yield TensorSlice(piece.name, piece.shape, tuple(one.start for one in piece.source), values)


def _bias_slices(model: Transformer) -> Iterator[TensorSlice]:
    """Selection biases, which no table has: they are no parameters."""
    for router in model.routers():
        if router.bias_E is not None:
            yield TensorSlice(f"{router.name}.expert_bias", tuple(router.bias_E.shape), (0,), router.bias_E)


def _holders(own: dict[str, dict[Box, Tensor]], mesh: Mesh) -> dict[str, dict[Box, list[int]]]:
    """Ranks that hold each part of each weight."""
    listed = {name: list(parts) for name, parts in own.items()}
    everyone = gather_objects(listed, mesh.world)
    holders: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, names in enumerate(everyone):
        for name, boxes in names.items():
            for box in boxes:
                holders[name][box].append(rank)
    return holders


def _tensors(plan: Plan, family: str, holders: dict[str, dict[Box, list[int]]]) -> dict[str, list[_Part]]:
    """Parts of every tensor of the checkpoint, in one order on all ranks."""
    tensors: dict[str, list[_Part]] = defaultdict(list)
    for weight, places in checkpoint_places(plan.model, family).items():
        for place in places:
            tensors[place.name] += [_Part(weight, place, box, tuple(ranks)) for box, ranks in holders[weight].items()]
    return tensors


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _assembled(
    parts: list[_Part], own: dict[str, dict[Box, Tensor]], owner: int, mesh: Mesh, device: torch.device
) -> Tensor | None:
    """The tensor on its owner, on the CPU; None elsewhere."""
    tensor = None
    if mesh.rank == owner:
        dtype = next(own[part.weight][part.box].dtype for part in parts if owner in part.ranks)
        tensor = torch.empty(parts[0].place.shape, dtype=dtype)
    for part in parts:
        sender = part.sender(owner)
        values = own[part.weight][part.box] if mesh.rank == sender else None
        if sender != owner and values is not None:
            dist.send(values.to(device).contiguous(), owner)  # main weights may be on the host; NCCL sends from a GPU
        if tensor is None:
            continue
        if values is None:
            values = torch.empty(part.box[1], dtype=tensor.dtype, device=device)
            dist.recv(values, sender)
        write_part(tensor, part.place, part.box[0], values.cpu())
    return tensor


def write_part(tensor: Tensor, place: Place, offsets: tuple[int, ...], values: Tensor) -> None:
    """Write the part of our weight that begins at ``offsets`` into the tensor of a checkpoint, as that lays it out."""
    view = tensor[place.index] if place.index else tensor
    if place.transposed:
        view = view.t()
    box: list[Any] = [slice(first, first + size) for first, size in zip(offsets, values.shape, strict=True)]
    if place.rows is not None:
        box[0] = torch.tensor([place.rows.theirs(row) for row in range(box[0].start, box[0].stop)])
    view[tuple(box)] = values - place.plus if place.plus else values


class _Writer:
    """One rank's files of at most ``max_file_bytes``, named once the number of all ranks' files is known."""

    def __init__(self, folder: Path, mesh: Mesh, max_file_bytes: int) -> None:
        self.folder, self.mesh, self.max_file_bytes = folder, mesh, max_file_bytes
        self.files: list[tuple[Path, dict[str, int]]] = []
        self.held: dict[str, Tensor] = {}
        self.held_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self.held and self.held_bytes + tensor.nbytes > self.max_file_bytes:
            self._flush()
        self.held[name] = tensor
        self.held_bytes += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save  # noqa: PLC0415 - a run without export need not have it

        if not self.held:
            return
        path = self.folder / f".part-{self.mesh.rank}-{len(self.files)}.safetensors"
        write_bytes_atomically(path, save(self.held, {"format": "pt"}))
        self.files.append((path, {name: tensor.nbytes for name, tensor in self.held.items()}))
        self.held, self.held_bytes = {}, 0

    def finish(self, config: dict[str, Any]) -> None:
        """The last file, final names, and from rank 0 the index where there are several files, the config last."""
        self._flush()
        files = [file for ranks in gather_objects(self.files, self.mesh.world) for file in ranks]
        weight_map: dict[str, str] = {}
        for number, (path, sizes) in enumerate(files, 1):
            final = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            if path in [own for own, _ in self.files]:
                path.replace(self.folder / final)
            weight_map |= dict.fromkeys(sizes, final)
        if self.mesh.world.size > 1:
            dist.barrier()
        if self.mesh.rank != 0:
            return
        if len(files) > 1:
            total_bytes = sum(sum(sizes.values()) for _, sizes in files)
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            write_text_atomically(self.folder / INDEX, json.dumps(index, indent=2) + "\n")
        write_text_atomically(self.folder / "config.json", json.dumps(config, indent=2) + "\n")
