"""Exchanges of tokens that run beside compute, forward and backward, inside an ordinary autograd graph.

A crossing has a graph of its own, made and run backward in the lane. Two nodes stand for it in the graph around:
forward, the second waits for the exchange; backward, the second starts it and the first waits. What the forward
computes between the two runs beside the exchange, and so does its backward, because autograd runs later nodes first.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moeplan.executor.fiber import Fiber
from moeplan.executor.lane import Lane, Tensors, Ticket
from moeplan.executor.scopes import scope

Place = Literal["arrived", "started"]


class Course:
    """One micro-batch in one stage. While it has a ``fiber``, that stops before and after it starts an exchange."""

    def __init__(self) -> None:
        self.fiber: Fiber | None = None

    def stop(self, place: Place) -> None:
        """Let others run."""
        if self.fiber is not None:
            self.fiber.stop(place)


class _Active(threading.local):
    course: Course | None = None


_active = _Active()


@contextmanager
def on_course(course: Course | None) -> Iterator[None]:
    """Crossings made inside belong to ``course``; without one, layers communicate as they go."""
    outer, _active.course = _active.course, course
    try:
        yield
    finally:
        _active.course = outer


def active_course() -> Course | None:
    """The course that the forward running in this thread is on."""
    return _active.course


class _Enter(Function):
    """Begins a graph: keeps nothing of the tensors, and puts their gradients into ``mailbox``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, mailbox: list[Tensor | None], *tensors: Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.mailbox = mailbox
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.mailbox[:] = grads
        return (None, None, *(None for _ in grads))


class Crossing:
    """One exchange of one micro-batch: ``work`` from its inputs to its outputs."""

    def __init__(self, lane: Lane, work: Callable[..., Tensors], course: Course) -> None:
        self._lane, self._work, self._course = lane, work, course
        self._mailbox: list[Tensor | None] = []
        self._edges: list[GradientEdge | None] = []
        self._ticket: Ticket | None = None
        self._inputs: Tensors = ()
        self._mark: object = None

    def arrive(self, inputs: Tensors) -> None:
        """Take what the exchange needs."""
        self._inputs = tuple(one.detach() for one in inputs)  # its graph begins here
        self._mark = self._lane.mark()
        self._course.stop("arrived")

    def start(self) -> None:
        """Begin the exchange."""
        inputs, self._inputs = self._inputs, ()
        self._ticket = self._lane.start(partial(self._forward, inputs), inputs, self._mark)
        self._course.stop("started")

    def start_back(self, grads: tuple[Tensor | None, ...]) -> None:
        """Begin the way back of the gradients of the outputs."""
        mark = self._lane.mark()
        self._course.stop("arrived")
        pairs = zip(self._edges, grads, strict=True)
        given = [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]
        self._edges = []
        self._ticket = self._lane.start(partial(self._backward, given), tuple(grad for _, grad in given), mark)
        self._course.stop("started")

    def finish(self) -> Tensors:
        """The outputs, after waiting for them."""
        assert self._ticket is not None
        with scope("dispatch"):
            results = self._ticket.wait()
        self._ticket = None
        return results

    def is_differentiable(self, index: int) -> bool:
        """Whether output ``index`` has a gradient: sizes and indices that travel along have none."""
        return self._edges[index] is not None

    def finish_back(self) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs, after waiting for them."""
        self.finish()
        grads, self._mailbox = tuple(self._mailbox), []
        return grads

    def _forward(self, inputs: Tensors) -> Tensors:
        anchor = inputs[0].new_empty(0).requires_grad_()
        with torch.enable_grad():
            outputs = self._work(*_Enter.apply(anchor, self._mailbox, *inputs))
        self._edges = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
        return tuple(output.detach() for output in outputs)

    def _backward(self, given: list[tuple[GradientEdge, Tensor]]) -> Tensors:
        edges, grads = [edge for edge, _ in given], [grad for _, grad in given]
        torch.autograd.backward(edges, grads)
        return tuple(grad for grad in self._mailbox if grad is not None)


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, crossing: Crossing, *inputs: Tensor) -> Tensor:
        ctx.crossing = crossing
        crossing.arrive(inputs)
        return inputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.crossing.finish_back())


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, crossing: Crossing, token: Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.crossing = crossing
        outputs = crossing.finish()
        plain = (output for index, output in enumerate(outputs) if not crossing.is_differentiable(index))
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor]:
        ctx.crossing.start_back(grads)
        given = next(grad for grad in grads if grad is not None)
        return None, given.new_empty(0)


def cross(
    lane: Lane,
    work: Callable[..., Tensors],
    course: Course,
    inputs: Tensors,
    beside: Callable[[], None] | None = None,
    *,
    asks_host: bool = False,
) -> Tensors:
    """``work(*inputs)``, run in the lane with ``beside`` beside it, both ways.

    ``asks_host``: the work waits for sizes from the device. Where that holds up the host, what runs beside is issued
    first, so that the device has work meanwhile.
    """
    crossing = Crossing(lane, work, course)
    token = _Start.apply(crossing, *inputs)
    del inputs  # the crossing lets go of them when the exchange is done
    comes_last = asks_host and lane.holds_up_host
    if beside is not None and comes_last:
        beside()
    crossing.start()
    if beside is not None and not comes_last:
        beside()
    return cast("Tensors", _Finish.apply(crossing, token))


def tensors_in(holder: object) -> Iterator[Tensor]:
    """All tensors that a dataclass holds, in tuples and dataclasses inside it as well."""
    if isinstance(holder, Tensor):
        yield holder
    elif isinstance(holder, tuple | list):
        for item in holder:
            yield from tensors_in(item)
    elif is_dataclass(holder):
        for one in fields(holder):
            yield from tensors_in(getattr(holder, one.name))
