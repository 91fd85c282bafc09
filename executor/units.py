"""Parameters cut into units that are gathered and reduced together: one a layer and class, and what no layer has."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from moeplan.executor.model import ModelStage, Transformer
from moeplan.executor.parameters import Entry


@dataclass(frozen=True)
class Unit:
    """Parameters of one class and the modules that use them: a layer, or the stages with embedding, head or norm."""

    modules: tuple[nn.Module, ...]
    entries: tuple[Entry, ...]

    @property
    def is_expert(self) -> bool:
        return self.entries[0].is_expert


def class_units(model: Transformer) -> list[Unit]:
    """All dense parameters, and all those of experts, where a rank has any."""
    by_class = ([entry for entry in model.table.entries if entry.is_expert == expert] for expert in (False, True))
    return [Unit((), tuple(entries)) for entries in by_class if entries]


def layer_units(model: Transformer) -> list[Unit]:
    """One unit for each layer and class, in the order in which forward uses them."""
    users: dict[int, list[nn.Module]] = {}
    for stage in model.stages:
        for module in _users(stage):
            for parameter in _own_parameters(module):
                users.setdefault(id(parameter), []).append(module)
    grouped: dict[tuple[tuple[int, ...], bool, bool], list[Entry]] = {}
    for entry in model.table.entries:
        modules = tuple(id(module) for module in users[id(entry.parameter)])
        grouped.setdefault((modules, entry.is_expert, entry.is_shared), []).append(entry)
    return [Unit(tuple(users[id(entries[0].parameter)]), tuple(entries)) for entries in grouped.values()]


def stage_layers(stage: ModelStage) -> list[nn.Module]:
    """Layers of a stage in the order of its forward."""
    return [*stage.layers, *stage.mtp]


def _users(stage: nn.Module) -> Iterator[nn.Module]:
    assert isinstance(stage, ModelStage)
    yield stage
    yield from stage_layers(stage)


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Of a layer all, of a stage those of none of its layers."""
    found = list(module.parameters())
    if not isinstance(module, ModelStage):
        return found
    in_layers = {id(parameter) for layer in stage_layers(module) for parameter in layer.parameters()}
    return [parameter for parameter in found if id(parameter) not in in_layers]
