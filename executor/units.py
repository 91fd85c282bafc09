"""Parameters cut into units that are gathered and reduced together: one a layer and class, and what no layer has."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import nn

from moeplan.executor.model import ModelStage, Transformer
from moeplan.executor.parameters import Entry


@dataclass(frozen=True)
class Unit:
    """Parameters of one class and the modules that use them: a layer, or embedding, head or stage of each stage."""

    modules: tuple[nn.Module, ...]
    entries: tuple[Entry, ...]

    @property
    def is_expert(self) -> bool:
        return self.entries[0].is_expert


def class_units(model: Transformer) -> list[Unit]:
    """All dense parameters, and all those of experts, where a rank has any.

    What other pipeline ranks hold as well is apart: beside different numbers of other parameters, the parts of it that
    ranks update would begin and end elsewhere on each.
    """
    found: dict[tuple[bool, bool], list[Entry]] = {}
    for entry in model.table.entries:
        found.setdefault((entry.is_expert, not entry.is_shared), []).append(entry)
    return [Unit((), tuple(entries)) for _, entries in sorted(found.items(), key=lambda item: item[0])]


def layer_units(model: Transformer) -> list[Unit]:
    """One unit for each layer and class, and for each of embedding, head and last norm, in the order of forward."""
    entries = {id(entry.parameter): entry for entry in model.table.entries}
    users: dict[int, list[nn.Module]] = {}
    for stage in model.stages:
        for module in _users(cast("ModelStage", stage)):
            for parameter in _own_parameters(module):
                users.setdefault(id(parameter), []).append(module)
    grouped: dict[tuple[tuple[int, ...], bool], list[Entry]] = {}
    for key, modules in users.items():
        entry = entries[key]
        grouped.setdefault((tuple(map(id, modules)), entry.is_expert), []).append(entry)
    return [Unit(tuple(users[id(found[0].parameter)]), tuple(found)) for found in grouped.values()]


def stage_layers(stage: ModelStage) -> list[nn.Module]:
    """Layers of a stage in the order of its forward."""
    return [*stage.layers, *stage.mtp]


def _users(stage: ModelStage) -> Iterator[nn.Module]:
    """Modules between which a stage's parameters are divided, in the order of its forward."""
    if stage.embed is not None:
        yield stage.embed
    yield from stage.layers
    yield stage
    yield from stage.mtp
    if stage.head_loss is not None:
        yield stage.head_loss


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Of a stage those that it uses itself, else all."""
    return list(module.parameters(recurse=not isinstance(module, ModelStage)))
