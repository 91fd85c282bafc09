"""The chained optimizer against torch's AdamW, and its schedule."""

import math

import pytest
import torch

from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, build_trainer, tiny_plan


def test_updates_are_those_of_adamw_with_one_clip_over_both_classes() -> None:
    run = RunConfig(lr=1e-2, weight_decay=0.3, clip_grad_norm=0.7)
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1), run)
    entries = trainer.model.table.entries
    copies = [entry.parameter.detach().clone().requires_grad_() for entry in entries]
    decayed = [copy for copy, entry in zip(copies, entries, strict=True) if entry.is_decayed]
    kept = [copy for copy, entry in zip(copies, entries, strict=True) if not entry.is_decayed]
    assert {copy.dim() for copy in kept} == {1}
    groups = [{"params": decayed, "weight_decay": run.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=run.lr, betas=(run.adam_beta1, run.adam_beta2), eps=run.adam_eps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for one in trainer.optimizer.classes:
            for main in one.buffer.main_grads:
                main.add_(torch.randn(main.total.shape, generator=generator, dtype=main.total.dtype))
        for copy, entry in zip(copies, entries, strict=True):
            copy.grad = grad_of(trainer.optimizer.classes[entry.is_expert].buffer, entry.parameter).clone()
        norm = math.sqrt(sum(trainer.optimizer.reduce_grads()))
        expected = float(torch.nn.utils.clip_grad_norm_(copies, run.clip_grad_norm))
        assert norm == pytest.approx(expected, rel=1e-12)
        trainer.optimizer.update(run.lr, norm)
        adam.step()
        for copy, entry in zip(copies, entries, strict=True):
            # clip_grad_norm_ divides by norm + 1e-6.
            torch.testing.assert_close(entry.parameter.detach(), copy.detach(), rtol=0, atol=1e-6)
        assert all(main.is_clear for one in trainer.optimizer.classes for main in one.buffer.main_grads)


def grad_of(buffer: object, parameter: torch.Tensor) -> torch.Tensor:
    """The view of a buffer's gradients that belongs to a parameter: at the same place as its weights."""
    from moeplan.executor.flat_buffer import FlatBuffer

    assert isinstance(buffer, FlatBuffer)
    start = parameter.storage_offset()
    return buffer.grads[start : start + parameter.numel()].view_as(parameter)


def test_bf16_weights_follow_fp32_main_weights() -> None:
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1, precision="bf16"), RunConfig(lr=1e-4))
    losses = [trainer.step(number).loss for number in range(3)]
    assert losses[-1] < losses[0]
    for one in trainer.optimizer.classes:
        assert one.buffer.weights.dtype == torch.bfloat16
        (part,) = one.parts
        assert one.buffer.grads.dtype == part.main.dtype == part.first.dtype == torch.float32
        torch.testing.assert_close(part.main.bfloat16(), one.buffer.weights, rtol=0, atol=0)
        # Steps of 1e-4 are below the spacing of bf16 at most weights, yet none is lost.
        assert not torch.equal(part.main, one.buffer.weights.float())
    num_elements = sum(one.buffer.num_elements for one in trainer.optimizer.classes)
    assert trainer.optimizer.weight_bytes == 2 * num_elements
    assert trainer.optimizer.grad_bytes == 4 * num_elements
    assert trainer.optimizer.state_bytes == 12 * num_elements
