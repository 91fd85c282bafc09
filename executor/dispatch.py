"""Which dispatcher a plan asks for: one literal table."""

from collections.abc import Callable

from moeplan.executor.dispatch_allgather import AllGatherDispatcher
from moeplan.executor.dispatch_alltoall import AllToAllDispatcher
from moeplan.executor.dispatch_deepep import DeepEpDispatcher
from moeplan.executor.dispatch_flex import FlexDispatcher
from moeplan.executor.dispatch_hybridep import HybridEpDispatcher
from moeplan.executor.dispatch_options import DispatchOptions, dispatch_options
from moeplan.executor.exchange import Dispatcher
from moeplan.executor.mesh import Mesh
from moeplan.model_spec import Moe
from moeplan.plan import Plan

# Dispatchers, and back ends of flex.
DISPATCHERS: dict[str, Callable[[DispatchOptions, Mesh], Dispatcher]] = {
    "alltoall": AllToAllDispatcher,
    "allgather": AllGatherDispatcher,
    "torch": FlexDispatcher,
    "deepep": DeepEpDispatcher,
    "hybridep": HybridEpDispatcher,
}


def build_dispatcher(plan: Plan, moe: Moe, mesh: Mesh) -> Dispatcher:
    """The dispatcher of a layer; the back end of ``flex`` is ``plan.flex_backend``.

    A rank that is alone exchanges nothing, for which ``alltoall`` has the least to do.
    """
    name = plan.flex_backend if plan.dispatcher == "flex" else plan.dispatcher
    if mesh.etp_ep.size == 1:
        name = "alltoall"
    return DISPATCHERS[name](dispatch_options(plan, moe), mesh)
