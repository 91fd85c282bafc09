import threading

import pytest
import torch

from moeplan.executor.fiber import Fiber

CPU = torch.device("cpu")


def test_two_fibers_run_by_turns() -> None:
    log: list[str] = []
    fibers = {name: Fiber(name, CPU) for name in ("first", "second")}

    def task(name: str) -> None:
        for step in range(2):
            log.append(f"{name} {step}")
            fibers[name].stop(f"stop {step}")
        log.append(f"{name} ends")

    for name, fiber in fibers.items():
        fiber.begin(lambda name=name: task(name))  # type: ignore[misc]
    places = [fibers[name].advance() for name in ("first", "second", "second", "first", "first", "second")]
    assert places == ["stop 0", "stop 0", "stop 1", "stop 1", "", ""]
    assert log == ["first 0", "second 0", "second 1", "first 1", "first ends", "second ends"]


def test_another_thread_may_stop_for_the_task() -> None:
    fiber, log = Fiber("owner", CPU), list[str]()

    def inside() -> None:
        fiber.stop("inside")
        log.append("went on")

    def task() -> None:
        helper = threading.Thread(target=inside)
        helper.start()
        helper.join()

    fiber.begin(task)
    assert fiber.advance() == "inside"
    assert not log
    assert fiber.advance() == ""
    assert log == ["went on"]


def test_an_error_is_raised_where_the_fiber_is_advanced_and_it_can_go_on() -> None:
    fiber = Fiber("failing", CPU)

    def fail() -> None:
        raise ZeroDivisionError

    fiber.begin(fail)
    with pytest.raises(ZeroDivisionError):
        fiber.advance()
    fiber.begin(lambda: None)
    assert fiber.advance() == ""


def test_an_abandoned_task_unwinds_and_one_not_begun_never_runs() -> None:
    fiber, log = Fiber("abandoned", CPU), list[str]()

    def task() -> None:
        try:
            fiber.stop("middle")
            log.append("went on")
        finally:
            log.append("unwound")

    fiber.begin(task)
    assert fiber.advance() == "middle"
    fiber.abandon()
    fiber.begin(task)
    fiber.abandon()
    fiber.abandon()
    assert log == ["unwound"]
    fiber.begin(lambda: log.append("next"))
    assert fiber.advance() == ""
    assert log == ["unwound", "next"]
