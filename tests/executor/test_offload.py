"""Offload changes where tensors wait and nothing else: same updates, memory let go, buffers used again."""

import gc
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import moeplan.executor.offload as offload_module
from moeplan.executor.host_buffers import HostBuffers, ParkedStorage
from moeplan.executor.mesh import build_mesh
from moeplan.executor.model import ModelStage, Transformer
from moeplan.executor.offload import Offloader
from moeplan.folding import Folding
from moeplan.model_spec import ModelSpec
from moeplan.run_config import RunConfig
from tests.executor.cases import DENSE_MODEL, GQA_MODEL, MLA_MODEL, run_steps, tiny_plan
from tests.executor.folding_cases import alone, assert_same_run
from tests.executor.offload_cases import train_sending_everything
from tests.executor.pools import Pools

CPU = torch.device("cpu")
MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")


@pytest.fixture(autouse=True)
def tiny_tensors_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "MIN_BYTES", 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"offload_layers": 1},
        {"offload_layers": 9},
        {"offload_modules": MODULES},
        {"offload_modules": ("fused_group_mlp",), "recompute": ("layernorm", "moe_act")},
        {"offload_modules": ("core_attn",), "recompute": ("core_attn",)},
        {"offload_modules": ("attn_norm",), "recompute": ("full",)},
        {"offload_modules": MODULES, "offload_layers": 1, "recompute": ("moe",)},
    ],
)
@pytest.mark.parametrize("model", [GQA_MODEL, MLA_MODEL])
def test_updates_are_those_without_offload(model: ModelSpec, changes: dict[str, Any]) -> None:
    run, plan = RunConfig(steps=2), tiny_plan(model, 1, mbs=2)
    plain = run_steps(0, plan, run, 2)
    sent = run_steps(0, plan.replace(**changes), run, 2)
    assert sent.losses == plain.losses
    assert sent.grad_norms == plain.grad_norms
    for mine, other in zip(sent.parts, plain.parts, strict=True):
        torch.testing.assert_close(mine.values, other.values, rtol=0, atol=0)


def four_layers(**changes: Any) -> tuple[Transformer, Offloader]:
    plan = tiny_plan(DENSE_MODEL.model_copy(update={"num_layers": 4}), 1, **changes)
    model = Transformer(plan, build_mesh(Folding(1), 0), seed=1, device=CPU)
    offloader = cast("ModelStage", model.stages[0]).offloader
    assert offloader is not None
    return model, offloader


def loss_of(model: Transformer) -> Tensor:
    ids = torch.arange(32).view(2, 16)
    loss: Tensor = model(ids, ids.roll(-1, 1))
    return loss


def parked_storages() -> list[ParkedStorage]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is ParkedStorage]


def test_only_the_last_two_layers_stay_until_backward() -> None:
    model, _ = four_layers(offload_modules=("attn_norm",))
    loss = loss_of(model)
    found = parked_storages()
    assert len(found) == 4
    assert sum(one.is_on_device for one in found) == 2
    del found
    loss.backward()
    assert parked_storages() == []


def test_a_device_may_be_given_without_its_number() -> None:
    """A tensor of "cuda" is on cuda:0, which equals neither in torch; likewise one of cpu:0 is on "cpu"."""
    plan = tiny_plan(DENSE_MODEL, 1, offload_modules=("attn_norm",))
    model = Transformer(plan, build_mesh(Folding(1), 0), seed=1, device=torch.device("cpu", 0))
    loss = loss_of(model)
    assert len(parked_storages()) == DENSE_MODEL.num_layers
    loss.backward()


def test_whole_layers_but_the_last_leave() -> None:
    model, offloader = four_layers(offload_layers=4)
    assert offloader.num_whole_layers == 3
    loss = loss_of(model)
    away = sum(not one.is_on_device for one in parked_storages())
    held = sum(one.is_on_device for one in parked_storages())
    assert away == 2 * held > 0, "layers 1 and 2 left, 3 had no time to"
    loss.backward()
    assert parked_storages() == []


def test_backward_calls_the_layer_before_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = four_layers(offload_modules=("attn_norm",))
    events: list[str] = []
    fetch, view = ParkedStorage.fetch, ParkedStorage.view

    def fetched(self: ParkedStorage) -> None:
        if not self.is_on_device:
            events.append("fetch")
        fetch(self)

    def viewed(self: ParkedStorage, *place: Any) -> Tensor:
        assert self.is_on_device, "it came back before it was asked for"
        events.append("use")
        return view(self, *place)

    monkeypatch.setattr(ParkedStorage, "fetch", fetched)
    monkeypatch.setattr(ParkedStorage, "view", viewed)
    loss_of(model).backward()
    assert events == ["use", "use", "fetch", "use", "fetch", "use"], "layers 4 and 3 never left; 2 and 1 come ahead"


def test_buffers_are_used_again() -> None:
    model, offloader = four_layers(offload_modules=("core_attn", "attn_proj"))
    loss_of(model).backward()
    taken = offloader.buffers.num_bytes
    for _ in range(3):
        loss_of(model).backward()
    assert offloader.buffers.num_bytes == taken > 0


def test_storage_comes_back_as_it_was() -> None:
    buffers, whole = HostBuffers(CPU), torch.arange(12.0).view(3, 4)
    expected, part = whole[1:, ::2].clone(), whole[1:, ::2]
    parked = ParkedStorage(part, buffers)
    place = part.dtype, part.size(), part.stride(), int(part.storage_offset())
    assert parked.view(*place).data_ptr() == part.data_ptr()
    parked.leave()
    del part, whole
    torch.testing.assert_close(parked.view(*place), expected, rtol=0, atol=0)
    del parked
    assert ParkedStorage(expected.new_zeros(12), buffers).is_on_device
    assert buffers.num_bytes == 64


def test_rows_of_ever_other_numbers_share_buffers() -> None:
    buffers = HostBuffers(CPU)
    for step in range(40):  # what experts get under dropless routing is another number of rows each time
        parked = [ParkedStorage(torch.full((900 + 7 * step + layer,), float(layer)), buffers) for layer in range(3)]
        for layer, one in enumerate(parked):
            one.leave()
            size = torch.Size((900 + 7 * step + layer,))
            assert torch.equal(one.view(torch.float32, size, (1,), 0), torch.full(size, float(layer)))
        del parked, one
    assert buffers.num_bytes <= 3 * (4096 + 8192), "three of each size that was ever needed, whatever the steps"


def test_validation_sends_nothing() -> None:
    model, offloader = four_layers(offload_layers=2)
    with torch.no_grad():
        loss_of(model)
    assert offloader.buffers.num_bytes == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"pp": 2, "vp": 2, "layout": "Et|tt|tm|mL", "offload_modules": MODULES},
        {"pp": 2, "offload_layers": 2},
        {"tp": 2, "ep": 2, "offload_modules": MODULES, "recompute": ("layernorm", "moe_act")},
        {"cp": 2, "cp_comm": "all_gather", "offload_modules": ("core_attn", "attn_proj")},
        {"sharding": "full", "offload_layers": 2, "offload_modules": ("expert_fc1",)},
    ],
)
def test_folded_with_offload_equals_alone_without(pools: Pools, changes: dict[str, Any]) -> None:
    assert_same_run(alone("mla", 1), pools[2].run(train_sending_everything, "mla", 2, changes))
