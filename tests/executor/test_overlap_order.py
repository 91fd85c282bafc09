"""The order in which exchanges and compute of a pair happen, and how a pair ends that fails."""

import threading
import time
from typing import Any, NamedTuple

import pytest
import torch

from moeplan.executor.crossing import Crossing
from moeplan.executor.fiber import Fiber
from moeplan.executor.lane import Tensors, ThreadLane, Ticket, exchange_lane
from moeplan.executor.lane import Work as LaneWork
from moeplan.kernels.weight_grad_queue import WeightGradQueue
from moeplan.pipeline_order import paired_order
from moeplan.plan import Plan
from tests.executor.cases import build_trainer, tiny_plan
from tests.executor.folding_cases import GQA, RUN, WINDOWED, alone
from tests.executor.pools import Pools


class Event(NamedTuple):
    """Something that a side (forward or backward) does: an exchange starts, runs, or is waited for; compute runs.

    Of weight gradients that were delayed, ``number`` run together.
    """

    side: str
    what: str
    number: int
    begin_s: float
    end_s: float


class Recorder:
    """What happens in one step of one rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        lane = exchange_lane(torch.device("cpu"))
        assert isinstance(lane, ThreadLane)
        start, advance, count = lane.start, Fiber.advance, iter(range(1_000_000))

        def recorded_start(work: LaneWork, inputs: Tensors, mark: object) -> Ticket:
            side, number = threading.current_thread().name, next(count)

            def run() -> Tensors:
                begin_s = time.monotonic()
                results = work()
                self.note(side, "exchange", number, begin_s)
                return results

            self.note(side, "start", number)
            ticket, recorder = start(run, inputs, mark), self

            class Recorded:
                def wait(self) -> Tensors:
                    recorder.note(side, "wait", number)
                    return ticket.wait()

            return Recorded()

        def recorded_advance(fiber: Fiber) -> str:
            begin_s = time.monotonic()
            place = advance(fiber)
            if place != "started":
                self.note(fiber.name, "compute", -1, begin_s)
            return place

        run_queue = WeightGradQueue.run

        def recorded_run(queue: WeightGradQueue) -> None:
            self.note("weights", "delayed", len(queue))
            run_queue(queue)

        patch.setattr(WeightGradQueue, "run", recorded_run)
        patch.setattr(lane, "start", recorded_start)
        patch.setattr(Fiber, "advance", recorded_advance)

    def note(self, side: str, what: str, number: int, begin_s: float | None = None) -> None:
        now = time.monotonic()
        self.events.append(Event(side, what, number, now if begin_s is None else begin_s, now))


def recorded_step(rank: int, plan: Plan) -> list[Event]:
    """Events of the second step."""
    trainer = build_trainer(rank, plan, RUN)
    trainer.step(0)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        trainer.step(1)
        return recorder.events


def hidden(events: list[Event]) -> tuple[int, int]:
    """Exchanges of fibers between whose start and wait the other side computes, and all exchanges of fibers."""
    num_hidden, numbers = 0, {event.number for event in events if event.side in {"forward", "backward"}} - {-1}
    for number in numbers:
        own = [(place, event) for place, event in enumerate(events) if event.number == number]
        first = next(place for place, event in own if event.what == "start")
        last = next(place for place, event in own if event.what == "wait")
        others = {event.side for event in events[first:last] if event.what == "compute"}
        num_hidden += bool(others - {own[0][1].side})
    return num_hidden, len(numbers)


def test_each_exchange_of_a_pair_is_waited_for_after_the_other_side_computed(pools: Pools) -> None:
    plan = tiny_plan(WINDOWED, 2, ep=2, ep_overlap=True, delay_wgrad=True)
    num_moe = WINDOWED.num_moe_layers
    num_pairs = plan.num_micro_batches - 1
    num_matrices = 4 * WINDOWED.num_layers + 3 * num_moe  # attention 2, MLP or shared expert 2, experts 2, router 1
    for events in pools[2].run(recorded_step, plan):
        # Dispatch and combine of a layer, each forward and backward.
        assert hidden(events) == (4 * num_moe * num_pairs, 4 * num_moe * num_pairs)
        # In the lane, exchanges run in the order in which they start, some while the other side computes.
        exchanges = [event for event in events if event.what == "exchange"]
        computed = [event for event in events if event.what == "compute"]
        assert [event.number for event in exchanges] == sorted(event.number for event in exchanges)
        # Both matrices of the experts wait, and those of attention, router, shared expert and dense layers.
        delayed = [event.number for event in events if event.what == "delayed"]
        assert delayed.count(2) == num_moe * num_pairs
        assert sum(delayed) == num_pairs * num_matrices
        assert any(
            compute.side != exchange.side and exchange.begin_s < compute.end_s and compute.begin_s < exchange.end_s
            for exchange in exchanges
            for compute in computed
        )


def failing_steps(rank: int, plan: Plan) -> tuple[list[str], float]:
    """Which errors end steps whose forward, or backward, fails in its second exchange beside the other; a loss then."""
    found = []
    for side, method in (("forward", "arrive"), ("backward", "start_back")):
        trainer, original, count = build_trainer(rank, plan, RUN), getattr(Crossing, method), iter(range(1000))

        def fail(*arguments: Any, side: str = side, original: Any = original, count: Any = count) -> Any:
            if threading.current_thread().name == side and next(count) == 1:
                raise ZeroDivisionError(side)
            return original(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Crossing, method, fail)
            try:
                trainer.step(0)
            except ZeroDivisionError as error:
                found.append(str(error))
    return found, build_trainer(rank, plan, RUN).step(0).loss


def test_an_error_on_one_side_ends_the_step_and_another_can_begin(pools: Pools) -> None:
    plan = tiny_plan(WINDOWED, 2, ep=2, ep_overlap=True)
    for found, loss in pools[2].run(failing_steps, plan):
        assert found == ["forward", "backward"]
        assert loss == pytest.approx(alone("windowed").losses[0], abs=1e-9)


def test_pairs_of_a_pipeline_hide_their_exchanges(pools: Pools) -> None:
    plan = tiny_plan(GQA, 4, pp=2, vp=2, ep=2, layout="Et|tt|t|mL", ep_overlap=True)
    for rank, events in enumerate(pools[4].run(recorded_step, plan)):
        pairs = paired_order(plan.pp, plan.vp, plan.num_micro_batches, rank // 2)
        both = [pair for pair in pairs if pair.forward is not None and pair.backward is not None]
        num_hidden, num_all = hidden(events)
        assert both
        assert num_hidden >= num_all - 2 * len(both)  # the longer chunk of a pair ends alone
        assert num_hidden > num_all / 2
