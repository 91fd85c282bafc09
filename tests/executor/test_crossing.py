"""Crossings keep gradients, run in the lane, and let compute run beside them both ways."""

import threading
import weakref

import pytest
import torch
from torch import Tensor

from moeplan.executor.crossing import Course, cross, tensors_in
from moeplan.executor.lane import ThreadLane
from moeplan.kernels.row_map import row_map

CPU = torch.device("cpu")


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.requires_grad_(), y.requires_grad_()


def work(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.exp() * y, y.square(), torch.arange(3)


def test_values_and_gradients_are_those_of_the_work() -> None:
    expected_x, expected_y = inputs()
    first, second, _ = work(expected_x.sin(), expected_y)
    (first.sum() + (second * expected_y).sum()).backward()
    x, y = inputs()
    first, second, third = cross(ThreadLane(), work, Course(), (x.sin(), y))
    assert third.tolist() == [0, 1, 2]
    (first.sum() + (second * y).sum()).backward()
    torch.testing.assert_close((x.grad, y.grad), (expected_x.grad, expected_y.grad), rtol=0, atol=1e-14)


def test_an_output_that_nothing_uses_and_an_input_without_gradient() -> None:
    x, y = inputs()
    first, *_ = cross(ThreadLane(), work, Course(), (x, y.detach()))
    first.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp() * y.detach())
    assert y.grad is None


def test_what_is_computed_between_start_and_finish_runs_beside_both_ways() -> None:
    lane, log, made = ThreadLane(), list[str](), list[Tensor]()
    go = threading.Event()

    class Logged(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, name: str, waits: bool) -> Tensor:
            ctx.name, ctx.waits = name, waits  # type: ignore[attr-defined]
            return Logged.act(x, f"{name} forward", waits)

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None, None]:
            return Logged.act(grads[0], f"{ctx.name} backward", ctx.waits), None, None  # type: ignore[attr-defined]

        @staticmethod
        def act(x: Tensor, what: str, waits: bool) -> Tensor:
            """The exchange waits, so that it can end only where the compute runs before it is waited for."""
            if waits:
                assert go.wait(10), "nothing ran beside the exchange"
                go.clear()
            else:
                go.set()
            log.append(what)
            return x.clone()

    x, y = inputs()
    (there,) = cross(
        lane,
        lambda x: (Logged.apply(x, "exchange", True),),
        Course(),
        (x * 2,),
        lambda: made.append(Logged.apply(y, "compute", False)),
    )
    (there * made[0]).sum().backward()
    assert set(log[:2]) == {"exchange forward", "compute forward"}
    assert set(log[2:]) == {"exchange backward", "compute backward"}
    torch.testing.assert_close((x.grad, y.grad), (2 * y.detach(), 2 * x.detach()))


def test_nothing_of_the_inputs_is_kept_for_backward() -> None:
    x, _ = inputs()
    copy = x * 2
    kept = weakref.ref(copy)
    (out,) = cross(ThreadLane(), lambda x: (x * 3,), Course(), (copy,))
    storage = copy.untyped_storage().data_ptr()
    del copy
    assert kept() is None
    assert out.untyped_storage().data_ptr() != storage
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 6))


def test_an_error_in_the_lane_is_raised_where_it_is_waited_for() -> None:
    x, _ = inputs()

    def fail(x: Tensor) -> tuple[Tensor, ...]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cross(ThreadLane(), fail, Course(), (x,))


def test_where_the_host_would_wait_compute_is_issued_before_the_exchange() -> None:
    class Held(ThreadLane):
        holds_up_host = True

    order = list[str]()

    def exchange(x: Tensor) -> tuple[Tensor, ...]:
        order.append("exchange")
        return (x * 3,)

    for lane, asks, expected in ((Held(), True, "compute"), (Held(), False, None), (ThreadLane(), True, None)):
        x, _ = inputs()
        (out,) = cross(lane, exchange, Course(), (x,), lambda: order.append("compute"), asks_host=asks)
        out.sum().backward()
        assert expected is None or order[0] == expected
        assert sorted(order) == ["compute", "exchange"]
        torch.testing.assert_close(x.grad, torch.full_like(x, 3))
        order.clear()


def test_tensors_inside_dataclasses_are_found() -> None:
    rows = row_map(torch.tensor([[0, 1], [1, 0]]), 2)
    found = {id(tensor) for tensor in tensors_in(([rows], "text", (rows.offsets_E,)))}
    assert found == {id(rows.slot_of_row_R), id(rows.row_of_slot_TK), id(rows.offsets_E)}
