"""Planners by which torch.distributed.checkpoint writes and reads slices of whole tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moeplan.errors import InvalidInputError
from moeplan.executor.tensor_slices import TensorSlice

Key = tuple[str, tuple[int, ...]]


def _chunk(part: TensorSlice) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.offsets), part.values.shape)


class SlicesToSave(DefaultSavePlanner):
    """Saves slices; torch checks that those of all ranks fill every tensor without overlapping."""

    def __init__(self, slices: Sequence[TensorSlice]) -> None:
        super().__init__(flatten_state_dict=False)
        self.slices: dict[Key, TensorSlice] = {(part.name, part.offsets): part for part in slices}

    def create_local_plan(self) -> SavePlan:
        """One item a slice."""
        items = [
            WriteItem(
                index=MetadataIndex(part.name, torch.Size(part.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(part),
                    properties=TensorProperties(dtype=part.values.dtype),
                    size=torch.Size(part.shape),
                ),
            )
            for part in self.slices.values()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of an item."""
        assert write_item.index.offset is not None
        return self.slices[write_item.index.fqn, tuple(write_item.index.offset)].values


class SlicesToLoad(DefaultLoadPlanner):
    """Reads slices, whatever slices were written. InvalidInputError where a tensor is missing or of another shape."""

    def __init__(self, slices: Sequence[TensorSlice]) -> None:
        super().__init__(flatten_state_dict=False)
        self.slices: dict[Key, TensorSlice] = {(part.name, part.offsets): part for part in slices}

    def create_local_plan(self) -> LoadPlan:
        """What to read of which stored chunk."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for part in self.slices.values():
            stored = self.metadata.state_dict_metadata.get(part.name)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != part.shape:
                got = tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else "nothing"
                raise InvalidInputError(
                    f"the checkpoint has {got} under {part.name}, the model needs {part.shape}",
                    "resume with a plan of the same model",
                )
            items += create_read_items_for_chunk_list(part.name, stored, [_chunk(part)])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The place an item is read into."""
        assert read_item.dest_index.offset is not None
        values = self.slices[read_item.dest_index.fqn, tuple(read_item.dest_index.offset)].values
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: items are read in place."""
