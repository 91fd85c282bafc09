"""A forward beside an older backward: the exchanges of one run while the other computes (report section 2.5).

Both are ordinary passes through a stage that stop before and after they start an exchange; the steps of LAYER_PAIR say
who goes on when. Layers without experts, embedding, loss and prediction depths run with the segment they stand in.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

from moeplan.executor.crossing import Course
from moeplan.executor.fiber import Fiber
from moeplan.executor.lane import exchange_lane
from moeplan.executor.scopes import scope
from moeplan.kernels.weight_grad_queue import WeightGradQueue, delaying
from moeplan.layer_pair import LAYER_PAIR, PairStep, Work

Task = Callable[[], None]


class _Side:
    """Forward or backward, as far as it has come."""

    def __init__(self, fiber: Fiber) -> None:
        self._fiber, self._course, self.is_open = fiber, Course(), False

    def begin(self, task: Task, course: Course) -> None:
        """Take a task and the course that its exchanges are on."""
        self._course, self.is_open = course, True
        course.fiber = self._fiber
        self._fiber.begin(task)

    def advance(self) -> None:
        """On to the next stop, where there is one."""
        if self.is_open and not self._fiber.advance():
            self._close()

    def abandon(self) -> None:
        """End where it stands."""
        self._fiber.abandon()
        self._close()

    def _close(self) -> None:
        self.is_open, self._course.fiber = False, None


class PairRunner:
    """Runs pairs on one rank, one at a time. ``delay_wgrad``: weight gradients run in steps of their own."""

    def __init__(self, device: torch.device, *, delay_wgrad: bool) -> None:
        forward, backward = _fibers(device)
        self._sides = {"f": _Side(forward), "b": _Side(backward)}
        self._queue = WeightGradQueue() if delay_wgrad else None
        self._exchange_comes_last = exchange_lane(device).holds_up_host

    def run(self, forward: tuple[Task, Course], backward: tuple[Task, Course]) -> None:
        """Both tasks to their end; gradients of inputs are sent on before the last weight gradients are made."""
        f, b = self._sides["f"], self._sides["b"]
        f.begin(*forward)
        b.begin(*backward)
        try:
            with delaying(self._queue):
                self._run_layers(f, b)
        except BaseException:
            f.abandon()
            b.abandon()
            raise
        self._make_weight_grads()

    def _run_layers(self, f: _Side, b: _Side) -> None:
        """Layer by layer; where one side has more of them, its rest alone."""
        b.advance()
        while f.is_open and b.is_open:
            for step in LAYER_PAIR:
                self._run_step(step)
        while f.is_open or b.is_open:
            f.advance()
            b.advance()
            self._make_weight_grads()

    def _run_step(self, step: PairStep) -> None:
        """The exchange first, unless its start holds up the host: the device should then have work already."""
        works = [step.exchange, *step.compute]
        if self._exchange_comes_last and step.exchange == Work("f", "dispatch", "fwd"):
            works = works[1:] + works[:1]
        for work in works:
            if work is None:
                continue
            if work.phase == "wgrad":
                self._make_weight_grads()
            else:
                self._sides[work.layer].advance()

    def _make_weight_grads(self) -> None:
        if self._queue is not None:
            with scope("expert_gemm"):  # those of linears say for themselves what they are
                self._queue.run()


@lru_cache
def _fibers(device: torch.device) -> tuple[Fiber, Fiber]:
    """The two of this process: threads end with it."""
    return Fiber("forward", device), Fiber("backward", device)
