"""What dispatchers need to know of a plan."""

from dataclasses import dataclass

from moeplan.kernels.capacity import expert_capacity
from moeplan.model_spec import Moe
from moeplan.plan import Plan


@dataclass(frozen=True)
class DispatchOptions:
    """``drops``: indices may equal ``num_experts``. ``is_padded``: each expert gets its capacity from every rank.

    ``num_sms`` are given to the kernels of a library; 0: its default.
    """

    num_experts: int
    top_k: int
    probs_before_fc2: bool
    drops: bool = False
    is_padded: bool = False
    capacity_factor: float = 1.0
    num_sms: int = 0

    def padded_capacity(self, num_tokens: int, num_ranks: int = 1) -> int | None:
        """Rows an expert gets from ``num_ranks`` ranks of ``num_tokens`` each; None where that depends on routing."""
        if not self.is_padded:
            return None
        return num_ranks * expert_capacity(num_tokens, self.top_k, self.num_experts, self.capacity_factor)


def dispatch_options(plan: Plan, moe: Moe) -> DispatchOptions:
    """Options of the layers of ``moe`` under the plan; capacity counts under routing ``drop`` alone."""
    drops = plan.routing == "drop"
    return DispatchOptions(
        num_experts=moe.num_experts + plan.echo_slots * plan.ep,
        top_k=moe.top_k,
        probs_before_fc2=plan.memory_efficient_permutation,
        drops=drops,
        is_padded=drops and moe.router.pad_to_capacity,
        capacity_factor=moe.router.capacity_factor,
        num_sms=plan.dispatch_sms,
    )
