"""Training whose experts read tokens by index instead of copies, against training with copies."""

from typing import Any

import pytest
import torch

from moeplan.executor.moe import Experts
from moeplan.kernels import gathered_gemm
from moeplan.kernels.back_end_choice import choose, forget
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, build_trainer, tiny_plan

MOE = GQA_MODEL.moe
assert MOE is not None
SHAPES = ((MOE.num_experts, 32, 2 * MOE.expert_ffn_size), (MOE.num_experts, MOE.expert_ffn_size, 32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel runs in the interpreter")
@pytest.mark.parametrize(
    "names, changes",
    [
        (("triton_gather", "triton_gather"), {}),
        (("triton_gather", "copy"), {"recompute": ("moe_act",), "paired_wgrad": ("expert_fc1", "expert_fc2")}),
        (("copy", "triton_gather"), {"recompute": ("full",)}),
    ],
)
def test_losses_and_norms_are_those_of_copies(names: tuple[str, str], changes: dict[str, Any]) -> None:
    plan = tiny_plan(GQA_MODEL, 1, precision="fp32", mbs=4, **changes)
    run = RunConfig(lr=1e-3)
    results = []
    for gathers in (False, True):
        for shape, name in zip(SHAPES, names, strict=True):
            if gathers:
                choose(gathered_gemm.OPERATION, shape, name)
        try:
            trainer = build_trainer(0, plan, run)
            experts = [module for module in trainer.model.modules() if isinstance(module, Experts)]
            assert [one.reads_tokens for one in experts] == [gathers]
            results.append([trainer.step(number) for number in range(2)])
        finally:
            forget()
    for copied, gathered in zip(*results, strict=True):
        # Sums in fp32 in another order.
        assert gathered.loss == pytest.approx(copied.loss, rel=1e-5)
        assert gathered.grad_norm == pytest.approx(copied.grad_norm, rel=1e-4)
