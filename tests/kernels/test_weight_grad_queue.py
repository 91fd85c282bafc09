import pytest

from moeplan.kernels.weight_grad_queue import WeightGradQueue, delaying, now_or_later


def test_additions_wait_in_order_and_run_once() -> None:
    queue, done = WeightGradQueue(), list[int]()
    now_or_later(lambda: done.append(0))
    with delaying(queue):
        now_or_later(lambda: done.append(1))
        with delaying(None):
            now_or_later(lambda: done.append(2))
        now_or_later(lambda: done.append(3))
    assert (done, len(queue)) == ([0, 2], 2)
    queue.run()
    queue.run()
    assert (done, len(queue)) == ([0, 2, 1, 3], 0)


def test_an_error_ends_the_delay() -> None:
    queue, done = WeightGradQueue(), list[int]()
    with pytest.raises(ZeroDivisionError), delaying(queue):
        raise ZeroDivisionError
    now_or_later(lambda: done.append(1))
    assert done == [1]
