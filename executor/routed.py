"""The way of tokens through their experts and back, at once or with other work beside its two exchanges."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moeplan.executor.crossing import Course, active_course, cross, tensors_in
from moeplan.executor.exchange import Arrived, Dispatcher, Exchange, combine, dispatch
from moeplan.executor.lane import Tensors, exchange_lane
from moeplan.kernels.router import Routing

Experts = Callable[[Arrived], Tensor]


class Beside(NamedTuple):
    """Compute that needs nothing of the exchange it runs beside."""

    dispatch: Callable[[], None]
    combine: Callable[[], None]


def route_tokens(
    dispatcher: Dispatcher, experts: Experts, x_LH: Tensor, routing: Routing, beside: Beside | None = None
) -> Tensor:
    """y_LH: each token's experts summed. On a course, or with work ``beside``, exchanges run in the device's lane."""
    course = active_course()
    if course is not None or beside is not None:
        return _cross(dispatcher, experts, x_LH, routing, course or Course(), beside)
    arrived, exchange = dispatch(dispatcher, x_LH, routing.expert_index_TK, routing.probs_TK)
    return combine(exchange, experts(arrived), arrived, routing.probs_TK)


def _cross(  # noqa: PLR0917 - what it runs, on what, and beside what
    dispatcher: Dispatcher, experts: Experts, x_LH: Tensor, routing: Routing, course: Course, beside: Beside | None
) -> Tensor:
    lane, probs_LK = exchange_lane(x_LH.device), routing.probs_TK
    found: list[Exchange] = []

    def send(x_LH: Tensor, probs_LK: Tensor) -> Tensors:
        packed, exchange = dispatcher.pack(x_LH, routing.expert_index_TK, probs_LK)
        found.append(exchange)
        return exchange.send(packed)

    lane.share([routing.expert_index_TK])
    beside_dispatch, beside_combine = beside or (None, None)
    sent = cross(lane, send, course, (x_LH, probs_LK), beside_dispatch, asks_host=True)
    (exchange,) = found
    lane.share(tensors_in(exchange))
    arrived = exchange.arrange(sent)
    del sent  # rows of every expert of every token: while others run, none should live that nobody needs
    ready = [exchange.collect(experts(arrived), arrived.probs)]
    del arrived
    (back,) = cross(lane, lambda rows: (exchange.send_back(rows),), course, (ready.pop(),), beside_combine)
    return exchange.unpack(back, probs_LK)
