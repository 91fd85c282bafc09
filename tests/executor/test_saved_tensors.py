"""Keepers see what is saved, one inside the other, and hold on to nothing themselves."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.executor.saved_tensors import Restore, is_parameter, keeping, kept, storage_key


def test_the_inner_keeper_is_asked_first_and_one_that_drops_before_both() -> None:
    asked: list[str] = []

    def ask(name: str, tensor: Tensor) -> Restore | None:
        asked.append(name)
        return None if name != "outer" else lambda: tensor

    x = torch.randn(3, requires_grad=True)
    with keeping(partial(ask, "drops"), drops=True), keeping(partial(ask, "outer")), keeping(partial(ask, "inner")):
        y = x.exp()
    assert asked == ["drops", "inner", "outer"]
    with keeping(partial(ask, "none")):
        x.sin()
    assert asked[3:] == ["none"]
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


@pytest.mark.parametrize("num_backwards", [1, 3])
def test_what_is_given_back_is_what_gradients_use(num_backwards: int) -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with keeping(lambda tensor: lambda: 2 * tensor.detach()):
        y = x.exp()
    for _ in range(num_backwards):
        y.sum().backward(retain_graph=True)
    torch.testing.assert_close(x.grad, num_backwards * 2 * x.detach().exp())


def test_a_graph_without_backward_goes() -> None:
    """Torch's hooks make a cycle of an output that they give back as it is."""
    seen: list[weakref.ref[Tensor]] = []
    x = torch.randn(1, 2, 8, 4, requires_grad=True)

    def look(tensor: Tensor) -> None:
        seen.append(weakref.ref(tensor))

    with keeping(look):
        y = F.scaled_dot_product_attention(x.exp(), x, x, is_causal=True).softmax(-1)
    assert len(seen) > 4
    assert y.grad_fn is not None
    del y, x
    gc.collect()
    assert [one() for one in seen] == [None] * len(seen)


def test_kept_without_keepers_is_the_tensor() -> None:
    x = torch.randn(3, requires_grad=True)
    assert kept(x)() is x
    y = x.exp()
    restored = kept(y)()
    assert storage_key(restored) == storage_key(y)
    with keeping(lambda tensor: lambda: tensor + 1):
        torch.testing.assert_close(kept(x)(), x + 1)


def test_parameters_and_views_of_them() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert is_parameter(weight)
    assert is_parameter(weight.t())
    assert not is_parameter(weight + 1)
