"""Weight gradients of a rank's experts that two micro-batches of a step add at once."""

from torch import nn

from moeplan.executor.moe import Experts
from moeplan.kernels.main_grad import main_grad_of
from moeplan.kernels.weight_grad_pairs import Pairs
from moeplan.plan import Plan


def pair_weight_grads(model: nn.Module, plan: Plan) -> None:
    """Let the matrices that the plan names wait for every second micro-batch; after they have main gradients."""
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        weights = {"expert_fc1": experts.in_weight_EHF, "expert_fc2": experts.out_weight_EFH}
        for name in plan.paired_wgrad:
            main = main_grad_of(weights[name])
            assert main is not None
            main.pairs = Pairs(plan.num_micro_batches)


def waiting_bytes(model: nn.Module) -> int:
    """Operands that wait for the next micro-batch."""
    mains = (main_grad_of(parameter) for parameter in model.parameters())
    return sum(main.pairs.waiting_bytes for main in mains if main is not None and main.pairs is not None)
