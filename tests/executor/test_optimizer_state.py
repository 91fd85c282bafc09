"""Where optimizer states are does not change what they become."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moeplan.executor.dtypes import plan_dtypes
from moeplan.executor.flat_buffer import Span
from moeplan.executor.optimizer_state import DecaySpan, HostPart, OffloadedPart, StatePart
from moeplan.executor.train import Trainer
from moeplan.kernels.adam import AdamOptions
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, build_trainer, tiny_plan

RUN = RunConfig(steps=4, lr=3e-3, lr_warmup_steps=2, clip_grad_norm=0.5)
OPTIONS = AdamOptions(1e-2, 0.9, 0.95, 1e-8, 0.0, 0.5)
DECAYS = [DecaySpan(Span(0, 7), 0.3), DecaySpan(Span(7, 12), 0.0)]


def trained(run: RunConfig = RUN, /, **changes: Any) -> Trainer:
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1, **changes), run)
    for number in range(run.steps):
        trainer.step(number)
    return trainer


def weights_of(trainer: Trainer) -> list[Tensor]:
    return [entry.parameter.detach().clone() for entry in trainer.model.table.entries]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [{"offload_optimizer_states": True}, {"optimizer_cpu_frac": 0.3}, {"optimizer_cpu_frac": 1.0}],
)
def test_states_on_the_host_change_nothing(precision: str, changes: dict[str, Any]) -> None:
    expected = weights_of(trained(precision=precision))
    found = weights_of(trained(precision=precision, **changes))
    # Bit by bit, but that a kernel over other spans may round a fused multiply-add differently.
    tolerance = {"fp64": 1e-15, "fp32": 1e-7, "bf16": 0.0}[precision]
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", [StatePart, OffloadedPart, HostPart])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_part_updates_its_elements_alone(kind: type[StatePart], precision: str) -> None:
    dtypes = plan_dtypes(tiny_plan(GQA_MODEL, 1, precision=precision))
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(12, generator=generator)
    whole = start.to(dtypes.param, copy=True)
    part = kind(Span(3, 9), whole[3:9], dtypes)
    expected = whole.to(torch.float32, copy=True)
    first, second = torch.zeros(12), torch.zeros(12)
    for step in range(1, 4):
        grads = torch.randn(12, generator=generator)
        part.fetch()
        part.step(grads.clone(), DECAYS, OPTIONS)
        first = 0.9 * first + 0.1 * 0.5 * grads
        second = 0.95 * second + 0.05 * (0.5 * grads) ** 2
        change = first / (1 - 0.9**step) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        decay = torch.tensor([0.3] * 7 + [0.0] * 5)
        expected = expected - 1e-2 * (decay * expected + change)
    torch.testing.assert_close(part.flats["weight"].float(), expected[3:9], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(part.flats["first_moment"], first[3:9], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(part.flats["second_moment"], second[3:9], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole[3:9], part.flats["weight"].to(dtypes.param), rtol=0, atol=0)
    untouched = [*range(3), *range(9, 12)]
    torch.testing.assert_close(whole[untouched], start.to(dtypes.param)[untouched], rtol=0, atol=0)


def test_offloaded_states_hold_no_device_memory_between_steps() -> None:
    trainer = trained(precision="bf16", offload_optimizer_states=True)
    for one in trainer.optimizer.classes:
        (part,) = one.parts
        assert all(flat.untyped_storage().nbytes() == 0 for flat in (part.main, part.first, part.second))
        assert all(flat.untyped_storage().nbytes() for flat in part.flats.values())
    assert trainer.optimizer.state_bytes == 0


def test_an_update_that_is_left_out_leaves_no_states_on_the_device() -> None:
    changes = {"precision": "bf16", "offload_optimizer_states": True}
    expected = trained(**changes)
    trainer = trained(**changes)
    for one in trainer.optimizer.classes:
        one.reduce_grads()
    trainer.optimizer.drop_grads()
    for one, other in zip(trainer.optimizer.classes, expected.optimizer.classes, strict=True):
        (part,), (kept,) = one.parts, other.parts
        assert all(flat.untyped_storage().nbytes() == 0 for flat in (part.main, part.first, part.second))
        torch.testing.assert_close(part.flats, kept.flats, rtol=0, atol=0)


def test_moments_in_bf16_take_half_and_train_alike() -> None:
    run = RUN.model_copy(update={"force_balance": True})  # else a token near a tie goes to another expert
    plain, halved = (trained(run, precision="bf16", moment_dtype=dtype) for dtype in ("fp32", "bf16"))
    num_elements = sum(one.buffer.num_elements for one in plain.optimizer.classes)
    assert plain.optimizer.state_bytes == 12 * num_elements
    assert halved.optimizer.state_bytes == 8 * num_elements
    for first, second in zip(weights_of(plain), weights_of(halved), strict=True):
        # Four updates of at most lr each; 8 bits of a moment move one by less than 2 %.
        torch.testing.assert_close(first, second, rtol=2**-7, atol=0.05 * RUN.steps * RUN.lr)


def test_both_places_share_a_step() -> None:
    trainer = trained(precision="bf16", optimizer_cpu_frac=0.25)
    for one in trainer.optimizer.classes:
        host, device = one.parts
        assert isinstance(host, HostPart)
        assert type(device) is StatePart
        assert host.span.size == round(0.25 * one.updated.size)
        assert device.span == Span(host.span.end, one.updated.size)
        assert host.device_bytes == 4 * host.span.size
        assert host.flats["first_moment"].any()
        torch.testing.assert_close(host.main, host.flats["weight"], rtol=0, atol=0)
