"""Recompute that drops an output keeps gradients and lets go of the memory."""

import weakref

import pytest
import torch
from torch import Tensor

from moeplan.executor.recompute import checkpointed, dropping_output


def test_dropped_output_is_freed_and_made_again() -> None:
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    outputs: list[weakref.ref[Tensor]] = []

    def produce(x: Tensor) -> tuple[Tensor]:
        output = torch.cat([x.exp(), x], 1)
        outputs.append(weakref.ref(output))
        return (output,)

    y = dropping_output(produce, (x,), lambda output: output @ weight)
    assert outputs[0]() is None
    assert len(outputs) == 1
    y.square().sum().backward()
    assert len(outputs) == 2
    dropped = x.grad, weight.grad
    x.grad = weight.grad = None
    (torch.cat([x.exp(), x], 1) @ weight).square().sum().backward()
    torch.testing.assert_close(dropped, (x.grad, weight.grad), rtol=0, atol=0)


def test_several_outputs_and_views_of_them() -> None:
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    made = 0

    def produce(x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal made
        made += 1
        first, second = (x * 2).split([2, 4], 1)
        return first, second.exp()

    def consume(first: Tensor, second: Tensor) -> Tensor:
        return (first.t() @ second[:, 1:]).sum() + (first * second[:, :2]).sum()

    dropping_output(produce, (x,), consume).backward()
    assert made == 2, "one forward, and once for all gradients that asked"
    dropped, x.grad = x.grad, None
    consume(*produce(x)).backward()
    torch.testing.assert_close(dropped, x.grad, rtol=0, atol=0)


@pytest.mark.parametrize("num_backwards", [1, 2])
def test_backward_may_run_again_while_the_graph_is_kept(num_backwards: int) -> None:
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    y = dropping_output(lambda x: (x.exp(),), (x,), lambda output: (output * output).sum())
    for _ in range(num_backwards):
        y.backward(retain_graph=True)
    torch.testing.assert_close(x.grad, num_backwards * 2 * (2 * x.detach()).exp())


def test_checkpointed_keeps_only_inputs() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    calls = 0

    def function(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.exp().sin()

    checkpointed(function, x).sum().backward()
    assert calls == 2
    torch.testing.assert_close(x.grad, x.detach().exp().cos() * x.detach().exp())
