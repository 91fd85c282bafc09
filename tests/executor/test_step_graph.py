"""Micro-batches by CUDA graphs: what plans may ask for it, and on a GPU the same steps as without."""

import pytest
import torch

from moeplan.errors import InvalidInputError
from moeplan.executor.check import check_graph, check_supported
from moeplan.executor.data import open_tokens
from moeplan.executor.measure import StepTrace
from moeplan.executor.mesh import build_mesh
from moeplan.executor.step_graph import StepGraph
from moeplan.executor.train import Trainer
from moeplan.model_spec import Moe, Router
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, tiny_plan

PLAN = tiny_plan(GQA_MODEL, 1, precision="bf16", cuda_graph=("full_iteration",))

MOE = Moe(num_experts=8, top_k=2, expert_ffn_size=16, router=Router(capacity_factor=1.0, pad_to_capacity=False))
UNPADDED = GQA_MODEL.model_copy(update={"moe": MOE})


def test_one_gpu_may_have_it() -> None:
    check_supported(PLAN)
    check_graph(PLAN, RunConfig())


def test_what_a_graph_cannot_hold_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"^cuda_graph: got attn on 4 GPUs, .* full_iteration on one GPU"):
        check_supported(tiny_plan(GQA_MODEL, 4, cuda_graph=("attn",)))
    for precision in ("fp64", "fp32"):
        with pytest.raises(InvalidInputError, match=rf"^precision: got {precision}"):
            check_supported(PLAN.replace(precision=precision))
    assert GQA_MODEL.moe is not None
    odd = GQA_MODEL.model_copy(update={"moe": GQA_MODEL.moe.model_copy(update={"expert_ffn_size": 20})})
    with pytest.raises(InvalidInputError, match=r"got full_iteration with 32 and 20, .* multiples of 8"):
        check_supported(PLAN.replace(model=odd))
    with pytest.raises(ValueError, match="graphs of whole MoE layers need routing drop or"):  # and padded to capacity
        check_supported(tiny_plan(UNPADDED, 1, precision="bf16", cuda_graph=("full_iteration",), routing="drop"))
    with pytest.raises(ValueError, match="paired_wgrad: in a graph of two micro-batches needs an even number of them"):
        PLAN.replace(mbs=1, global_batch_size=3, paired_wgrad=("expert_fc1",))
    with pytest.raises(InvalidInputError, match=r"^force_balance: got True with cuda_graph full_iteration"):
        check_graph(PLAN, RunConfig(force_balance=True))


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(InvalidInputError, match=r"^cuda_graph: got full_iteration on a CPU"):
        StepGraph(lambda _: torch.zeros(1), [], torch.zeros(1))


@pytest.mark.gpu
@pytest.mark.parametrize("paired", [(), ("expert_fc1", "expert_fc2")], ids=["alone", "paired"])
def test_steps_are_those_without_graphs(paired: tuple[str, ...]) -> None:
    device, losses = torch.device("cuda", 0), []
    graphed = PLAN.replace(paired_wgrad=paired)
    for plan in (graphed, graphed.replace(cuda_graph=())):
        run = RunConfig(lr=1e-3)
        trainer = Trainer(plan, run, build_mesh(plan.folding, 0), open_tokens(plan, run), device)
        results = [trainer.step(number) for number in range(6)]
        losses.append([(one.loss, one.grad_norm) for one in results])
    for found, eager in zip(*losses, strict=True):
        assert found == pytest.approx(eager, rel=1e-3)  # sums of gradients of the embedding come in any order
    assert losses[0][-1][0] < losses[0][0][0]


@pytest.mark.gpu
def test_a_traced_step_knows_its_families() -> None:
    device, run = torch.device("cuda", 0), RunConfig(lr=1e-3)
    trainer = Trainer(PLAN, run, build_mesh(PLAN.folding, 0), open_tokens(PLAN, run), device)
    for number in range(3):
        trainer.step(number)
    with StepTrace(device) as trace:
        trainer.step(3)
    assert {"attention", "dense_gemm", "expert_gemm", "router", "permute"} <= set(trace.family_times(1))
    assert trainer.step(4).loss == pytest.approx(trainer.step(5).loss, abs=1.0)
