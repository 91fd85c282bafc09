"""Which dispatcher a plan asks for: one literal table."""

from collections.abc import Callable

from moeplan.executor.dispatch_alltoall import AllToAllDispatcher
from moeplan.executor.exchange import Dispatcher
from moeplan.executor.mesh import Mesh
from moeplan.model_spec import Moe
from moeplan.plan import Plan

DISPATCHERS: dict[str, Callable[[Plan, Moe, Mesh], Dispatcher]] = {
    "alltoall": AllToAllDispatcher,
}


def build_dispatcher(plan: Plan, moe: Moe, mesh: Mesh) -> Dispatcher:
    """The dispatcher of a layer; the back end of ``flex`` is ``plan.flex_backend``."""
    name = plan.flex_backend if plan.dispatcher == "flex" else plan.dispatcher
    return DISPATCHERS[name](plan, moe, mesh)
