"""What a rank keeps under each sharding, and when weights and gradients travel."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moeplan.executor.decoder_layer import DecoderLayer
from moeplan.executor.fsdp import ShardedBuffer
from moeplan.executor.mesh import build_mesh
from moeplan.executor.model import Embedding, HeadLoss, Transformer
from moeplan.executor.mtp import MtpLayer
from moeplan.executor.units import class_units, layer_units
from moeplan.hwprofiles.load import load_profile
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from moeplan.simulator.memory import memory_by_rank
from moeplan.simulator.stack import load_stack
from tests.executor.cases import build_trainer, tiny_plan
from tests.executor.folding_cases import MODELS, Ran, assert_same_run, ran_steps
from tests.executor.gloo_pool import GlooPool, gloo_pool

RUN = RunConfig(lr=3e-3)
CATEGORIES = {"weights": "weight", "gradients": "grad", "optimizer": "state"}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(4, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


def plan_of(model: str, changes: dict[str, Any]) -> Plan:
    return tiny_plan(MODELS[model], 4, **changes)


Bytes = dict[str, float]


def bytes_kept(rank: int, model: str, changes: dict[str, Any]) -> tuple[int, Bytes, Bytes, int]:
    """Pipeline rank, bytes of each category after a step, with gaps and without, and bytes of all their storages."""
    trainer = build_trainer(rank, plan_of(model, changes), RUN)
    trainer.step(0)
    trainer.optimizer.finish_gathers()
    optimizer = trainer.optimizer
    held = {name: float(getattr(optimizer, f"{attribute}_bytes")) for name, attribute in CATEGORIES.items()}
    storages, needed = {}, dict.fromkeys(CATEGORIES, 0.0)
    for one in optimizer.classes:
        buffer, states = one.buffer, [flat for part in one.parts for flat in part.flats.values()]
        used_frac = sum(entry.parameter.numel() for entry in buffer.entries) / buffer.weights.numel()
        needed["weights"] += (buffer.resident_weights.nbytes + one.copy_bytes) * used_frac
        needed["gradients"] += buffer.resident_grads.nbytes * used_frac
        needed["optimizer"] += one.state_bytes * used_frac
        for flat in (buffer.weights, buffer.grads, buffer.resident_weights, buffer.resident_grads, *states):
            storages[flat.untyped_storage()._cdata] = flat.untyped_storage().nbytes()
    return trainer.mesh.pp.index, held, needed, sum(storages.values())


@pytest.mark.parametrize(
    "model, changes",
    [
        ("gqa", {"sharding": "full", "ep": 2, "precision": "bf16"}),
        ("gqa", {"sharding": "full", "dp_replicate": 2, "ep": 2, "precision": "bf16", "moment_dtype": "bf16"}),
        ("windowed", {"sharding": "full", "pp": 2, "precision": "bf16", "grad_dtype": "bf16"}),
        ("mla", {"sharding": "full", "ep": 2, "precision": "bf16"}),
        ("windowed", {"sharding": "full", "tp": 2, "precision": "fp32"}),
        ("gqa", {"sharding": "optimizer", "ep": 2, "precision": "bf16", "moment_dtype": "bf16"}),
        ("gqa", {"sharding": "optimizer", "dp_replicate": 2, "precision": "bf16"}),
        ("windowed", {"sharding": "none", "ep": 4, "precision": "bf16"}),
    ],
)
def test_bytes_of_a_rank_are_the_simulators(pool: GlooPool, model: str, changes: dict[str, Any]) -> None:
    plan = plan_of(model, changes)
    expected = memory_by_rank(plan.model, plan.point, load_stack("native"), load_profile("h200"))
    for stage, held, needed, storage_bytes in pool.run(bytes_kept, model, changes):
        assert needed == pytest.approx({category: expected[category][stage] for category in CATEGORIES})  # type: ignore[index]
        assert storage_bytes == sum(held.values())
        assert all(needed[category] <= held[category] <= 1.01 * needed[category] for category in CATEGORIES)


def most_whole(rank: int, changes: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Layers and matrices of the vocabulary with whole weights, or gradients, at once: most, and at the end."""
    trainer = build_trainer(rank, plan_of("gqa", changes), RUN)
    layers = {id(module) for module in trainer.model.modules() if isinstance(module, DecoderLayer | MtpLayer)}
    found: dict[str, list[ShardedBuffer]] = {"layers": [], "vocabulary": []}
    for one in trainer.optimizer.classes:
        if isinstance(one.buffer, ShardedBuffer) and not one.unit.is_expert:
            user = one.unit.modules[0]
            if id(user) in layers:
                found["layers"].append(one.buffer)
            elif isinstance(user, Embedding | HeadLoss):
                found["vocabulary"].append(one.buffer)
    seen: list[dict[str, int]] = []

    def look(*_: object) -> None:
        counts = {}
        for name, buffers in found.items():
            counts[f"{name} weights"] = sum(one.weights.untyped_storage().nbytes() > 0 for one in buffers)
            counts[f"{name} grads"] = sum(one.grads.untyped_storage().nbytes() > 0 for one in buffers)
        seen.append(counts)

    for module in trainer.model.modules():
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    trainer.step(0)
    look()
    return {name: (max(one[name] for one in seen), seen[-1][name]) for name in seen[0]}


@pytest.mark.parametrize("recompute", [(), ("full",)])
@pytest.mark.parametrize("prefetches", [True, False])
def test_two_layers_are_whole_at_most(pool: GlooPool, recompute: tuple[str, ...], *, prefetches: bool) -> None:
    changes = {"sharding": "full", "recompute": recompute, "overlap_param_gather": prefetches}
    for found in pool.run(most_whole, changes):
        assert found["layers weights"] == (2 if prefetches else 1, 0)
        assert found["layers grads"] in {(1, 0), (2, 0)}
        assert found["vocabulary weights"] == (1, 0)
        assert found["vocabulary grads"] == (1, 0)


def under_way(rank: int, changes: dict[str, Any]) -> tuple[list[tuple[str, bool]], list[bool], int]:
    """Per unit: its user, gradients travel when backward ends; weights travel when the step does; units seen twice."""
    trainer = build_trainer(rank, plan_of("gqa", changes), RUN)
    reducing: list[tuple[str, bool]] = []
    reduce_grads = trainer.optimizer.reduce_grads

    def watched() -> list[float]:
        for one in trainer.optimizer.classes:
            user = type(one.unit.modules[0]).__name__ if one.unit.modules else "all"
            reducing.append((user, one.buffer.is_reducing))
        return reduce_grads()

    trainer.optimizer.reduce_grads = watched  # type: ignore[method-assign]
    trainer.step(0)
    gathering = [one.buffer.is_gathering for one in trainer.optimizer.classes]
    trainer.step(1)
    return reducing[: len(gathering)], gathering, len(reducing)


def test_layers_reduce_in_backward_and_gather_in_forward(pool: GlooPool) -> None:
    for reducing, gathering, num_seen in pool.run(under_way, {"ep": 2}):
        # Embedding and last norm wait for the end of backward, where no input's gradient says that they are done.
        assert all(early == (user not in {"Embedding", "ModelStage"}) for user, early in reducing)
        assert reducing[0][0] == "Embedding"
        assert reducing[-1][0] == "HeadLoss"
        assert all(gathering)
        assert num_seen == 2 * len(reducing)


def test_without_overlap_one_unit_a_class_waits_for_the_end(pool: GlooPool) -> None:
    changes = {"ep": 2, "overlap_grad_reduce": False, "overlap_param_gather": False}
    for reducing, gathering, _ in pool.run(under_way, changes):
        assert reducing == [("all", False)] * 2
        assert gathering == [False, False]


@pytest.mark.parametrize("model", MODELS)
def test_units_hold_every_parameter_once(model: str) -> None:
    trainer = build_trainer(0, tiny_plan(MODELS[model], 1), RUN)
    everything = {id(entry) for entry in trainer.model.table.entries}
    for units in (layer_units(trainer.model), class_units(trainer.model)):
        found = [id(entry) for unit in units for entry in unit.entries]
        assert len(found) == len(set(found))
        assert set(found) == everything
        assert all(len({entry.is_expert for entry in unit.entries}) == 1 for unit in units)
    kinds = MODELS[model].layer_kinds
    num_mtp = 1 if MODELS[model].mtp_shared else MODELS[model].num_mtp_layers
    vocabulary, num_moe = 1 if MODELS[model].tied_embeddings else 2, sum(kind.mlp == "moe" for kind in kinds) + num_mtp
    assert len(layer_units(trainer.model)) == vocabulary + 1 + len(kinds) + num_mtp + num_moe


def test_parameters_have_no_storage_before_they_are_split() -> None:
    plan = tiny_plan(MODELS["gqa"], 1, sharding="full")
    model = Transformer(plan, build_mesh(plan.folding, 0), 0, torch.device("cpu"))
    assert all(entry.parameter.untyped_storage().nbytes() == 0 for entry in model.table.entries)


def trained_by_class(rank: int, num_gpus: int, changes: dict[str, Any]) -> Ran:
    """Steps of a model whose embedding, which is its head too, is most of it."""
    model = MODELS["mla"].model_copy(update={"vocab_size": 2048})
    trainer = build_trainer(rank, tiny_plan(model, num_gpus, **changes), RUN)
    return ran_steps(trainer, range(2))


def test_what_pipeline_ranks_share_is_cut_alike_on_each(pool: GlooPool) -> None:
    """Their other parameters are not equally many, and the parts that are updated go through the embedding."""
    changes = {"pp": 2, "sharding": "optimizer", "overlap_grad_reduce": False, "overlap_param_gather": False}
    assert_same_run(trained_by_class(0, 1, {}), pool.run(trained_by_class, 4, changes))
