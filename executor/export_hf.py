"""The trained model as a Hugging Face folder: ``config.json`` and sharded safetensors with their index.

Whole weights are put together one after the other on rank 0, so that no rank ever holds more than one file's worth.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeplan.executor.mesh import Mesh
from moeplan.executor.model import Transformer
from moeplan.executor.parameters import Entry, ParameterTable, Piece
from moeplan.files import write_bytes_atomically, write_text_atomically
from moeplan.hf_export import hf_config_of, hf_weight_name
from moeplan.model_spec import MlaAttention, ModelSpec
from moeplan.plan import Plan
from moeplan.units import GIB

# Bytes of a file: what rank 0 holds in memory at once.
MAX_FILE_BYTES = 2 * GIB

# A part of a whole weight and the rank that brings it.
Part = tuple[tuple[slice, ...], int]


def export_hf(plan: Plan, mesh: Mesh, model: Transformer, folder: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write the weights in their compute dtype; rank 0 writes. Collective over the world.

    InvalidInputError where no family holds the model or the folder cannot be written.
    """
    config = hf_config_of(plan.model)
    own = _own_pieces(model)
    listed = [(name, piece.shape, piece.source, mesh.rank) for name, (piece, _) in own.items()]
    everyone: list[list[Any]] = [listed] * mesh.world.size
    if mesh.world.size > 1:
        dist.all_gather_object(everyone, listed)
    parts: dict[str, list[Part]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape, source, rank in (item for ranks in everyone for item in ranks):
        shapes[name] = shape
        if source not in [known for known, _ in parts[name]]:
            parts[name].append((source, rank))
    writer = _Writer(folder, max_file_bytes) if mesh.rank == 0 else None
    for name in sorted(parts):
        whole = _whole(shapes[name], parts[name], own.get(name), mesh, model.table)
        if writer is not None and whole is not None:
            target = hf_weight_name(name, plan.model, config["model_type"])
            writer.add(target, in_hf_layout(name, whole, plan.model))
    if writer is not None:
        for name, bias_E in _biases(plan, model, mesh).items():
            writer.add(name, bias_E)
        writer.finish(config)


def _own_pieces(model: Transformer) -> dict[str, tuple[Piece, Entry]]:
    """Pieces of this rank by the name of their whole weight."""
    return {piece.name: (piece, entry) for entry in model.table.entries for piece in entry.pieces}


def _whole(
    shape: tuple[int, ...], parts: list[Part], own: tuple[Piece, Entry] | None, mesh: Mesh, table: ParameterTable
) -> Tensor | None:
    """The whole weight on rank 0, on the CPU; None elsewhere. ``own``: this rank's piece of it."""
    whole = torch.empty(shape, dtype=table.dtype) if mesh.rank == 0 else None
    for source, rank in parts:
        part_shape = tuple(len(range(*one.indices(size))) for one, size in zip(source, shape, strict=True))
        part = None
        if mesh.rank == rank and own is not None:
            piece, entry = own
            part = entry.parameter.detach()[piece.target].reshape(part_shape).contiguous()
            if rank != 0:
                dist.send(part, 0)
        elif mesh.rank == 0:
            part = torch.empty(part_shape, dtype=table.dtype, device=table.device)
            dist.recv(part, rank)
        if whole is not None and part is not None:
            whole[source] = part.cpu()
    return whole


def in_hf_layout(name: str, whole: Tensor, model: ModelSpec) -> Tensor:
    """The weight as Hugging Face lays it out.

    Experts are [in, out] here and [out, in] there. DeepSeek's rotary channels come in pairs there (2i, 2i + 1) and as
    halves here (i, i + D/2).
    """
    attention = model.attention
    if ".experts." in name:
        return whole.t().contiguous()
    if not isinstance(attention, MlaAttention):
        return whole.contiguous()
    rope = attention.qk_rope_head_dim
    if name.endswith("attention.query_up.weight"):
        heads = whole.unflatten(0, (attention.num_heads, attention.qk_head_dim))
        nope, turned = heads.split([attention.qk_nope_head_dim, rope], 1)
        return torch.cat([nope, _paired(turned, 1)], 1).flatten(0, 1).contiguous()
    if name.endswith("attention.key_value_down.weight"):
        latent, turned = whole.split([attention.kv_lora_rank, rope], 0)
        return torch.cat([latent, _paired(turned, 0)], 0).contiguous()
    return whole.contiguous()


def _paired(x: Tensor, dim: int) -> Tensor:
    """Channels i and i + D/2 side by side."""
    first, second = x.chunk(2, dim)
    return torch.stack([first, second], dim + 1).flatten(dim, dim + 1)


def _biases(plan: Plan, model: Transformer, mesh: Mesh) -> dict[str, Tensor]:
    """Selection biases of this rank's routers by Hugging Face's name; where there are any, pp is 1 (check_export)."""
    names = (f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in _moe_layers(plan))
    biases = (router.bias_E for router in model.routers())
    return {name: bias.cpu() for name, bias in zip(names, biases, strict=False) if bias is not None}


def _moe_layers(plan: Plan) -> list[int]:
    return [layer for layer, kind in enumerate(plan.model.layer_kinds) if kind == "moe"]


class _Writer:
    """Files of at most ``max_file_bytes``, named once their number is known."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self.folder, self.max_file_bytes = folder, max_file_bytes
        self.files: list[tuple[Path, list[str]]] = []
        self.held: dict[str, Tensor] = {}
        self.held_bytes = self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self.held and self.held_bytes + tensor.nbytes > self.max_file_bytes:
            self._flush()
        self.held[name] = tensor
        self.held_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save  # noqa: PLC0415 - a run without export need not have it

        path = self.folder / f"model-part-{len(self.files) + 1}.safetensors"
        write_bytes_atomically(path, save(self.held, {"format": "pt"}))
        self.files.append((path, list(self.held)))
        self.held, self.held_bytes = {}, 0

    def finish(self, config: dict[str, Any]) -> None:
        """The last file, final names, the index where there is more than one file, and the config last of all."""
        self._flush()
        count = len(self.files)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self.files, 1):
            final = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            path.replace(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            write_text_atomically(self.folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
        write_text_atomically(self.folder / "config.json", json.dumps(config, indent=2) + "\n")
