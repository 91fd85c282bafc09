"""Weight gradients of experts that two micro-batches add at once: the same training, and the memory predicted."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moeplan.errors import InvalidInputError
from moeplan.executor import quantized, quantized_experts
from moeplan.executor.check import check_supported
from moeplan.executor.moe import Experts
from moeplan.executor.paired_weight_grad import waiting_bytes
from moeplan.executor.quantized import QuantizedWeight, expert_gemm, set_quantized
from moeplan.kernels.activation import activation
from moeplan.kernels.main_grad import MainGrad, set_main_grad
from moeplan.kernels.weight_grad_pairs import Pairs
from moeplan.kernels.weight_grad_queue import WeightGradQueue, delaying
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from moeplan.simulator.layer_state import waiting_bytes as predicted_bytes
from moeplan.simulator.placement import rank_chunks
from moeplan.simulator.stack import load_stack
from tests.executor.cases import GQA_MODEL, MLA_MODEL, build_trainer, run_steps, tiny_plan
from tests.executor.precision_cases import GQA, MLA, low_plan
from tests.executor.test_folding_equality import RUN
from tests.kernels.fp8_interpreter import exact_fp8

BOTH = {"paired_wgrad": ("expert_fc1", "expert_fc2")}


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": ("full",)},
        {"recompute": ("moe_act", "layernorm"), "paired_wgrad": ("expert_fc1",)},
        {"paged_stash_factor": 1.5},
        {"memory_efficient_permutation": False},
        {"routing": "drop"},
        {"offload_modules": ("expert_fc1",)},
        {"global_batch_size": 6, "mbs": 2},  # three micro-batches: the first goes alone
    ],
)
def test_training_is_that_without_pairs(changes: dict[str, Any]) -> None:
    plan = tiny_plan(GQA_MODEL, 1, **(BOTH | changes))
    paired, plain = (run_steps(0, one, RUN, 3) for one in (plan, plan.replace(paired_wgrad=())))
    assert paired.losses == pytest.approx(plain.losses, abs=1e-12)
    assert paired.grad_norms == pytest.approx(plain.grad_norms, rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp8_current"},
        {"precision": "fp8_delayed", "paired_wgrad": ("expert_fc2",)},
        {"precision": "fp8_blockwise", "recompute": ("moe_act", "layernorm")},
        {"precision": "fp8_current", "recompute": ("full",)},
        {"precision": "fp8_blockwise", "fp8_primary_weights": True},
        {"precision": "fp8_current", "paged_stash_factor": 1.5},
        {"precision": "fp8_current", "bf16_last_layers": 1},  # the one with experts
        {"precision": "fp8_current", "global_batch_size": 6, "mbs": 2},  # three micro-batches: the first goes alone
    ],
)
def test_training_in_fp8_is_that_without_pairs(changes: dict[str, Any]) -> None:
    plan = low_plan(GQA, 1, **(BOTH | changes))
    check_supported(plan)
    paired, plain = (run_steps(0, one, RUN, 3) for one in (plan, plan.replace(paired_wgrad=())))
    # The reference adds one after the other, so sums are the same; what is quantized would make jumps of other sums.
    assert paired.losses == pytest.approx(plain.losses, rel=1e-6)
    assert paired.grad_norms == pytest.approx(plain.grad_norms, rel=1e-6)


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_kernels_that_would_add_one_by_one_are_refused(precision: str) -> None:
    check_supported(low_plan(GQA, 1, precision=precision))
    with pytest.raises(InvalidInputError, match=r"^paired_wgrad: got .*, the native executor runs it with .* in FP8,"):
        check_supported(low_plan(GQA, 1, precision=precision, **BOTH))


def _two_micro_batches(recipe: str, is_paired: bool, is_fused: bool, keeps_input: bool) -> list[Tensor]:
    """Main gradients of both matrices of three experts after two micro-batches, each's gradients delayed."""
    generator = torch.Generator().manual_seed(3)
    weights, mains = [], []
    for shape in ((3, 128, 256), (3, 128, 128)):
        weight = nn.Parameter(torch.randn(shape, generator=generator).mul_(0.1).bfloat16())
        set_quantized(weight, QuantizedWeight(recipe, is_input_first=True, keeps_input=keeps_input))
        mains.append(MainGrad(torch.full(shape, torch.nan), pairs=Pairs(2) if is_paired else None))
        set_main_grad(weight, mains[-1])
        weights.append(weight)
    first, second = weights
    queue = WeightGradQueue()
    for ends, size in (((70, 70, 200), 1.0), ((0, 90, 100), 1e-3)):
        x_RH, grad_RH = (torch.randn(ends[-1], 128, generator=generator).bfloat16() for _ in range(2))
        x_RH, offsets_E = x_RH.requires_grad_(), torch.tensor(ends, dtype=torch.int32)
        with exact_fp8(), delaying(queue):
            if is_fused:
                y_RH = quantized_experts.quantized_experts(x_RH, None, offsets_E, (first, second), "swiglu")
            else:
                y_RH = expert_gemm(activation(expert_gemm(x_RH, first, offsets_E), "swiglu", None), second, offsets_E)
            y_RH.backward(grad_RH * size)
        assert len(queue) == 2
        with exact_fp8():
            queue.run()
    for main in mains:
        main.finish_()
    return [main.total for main in mains]


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: tests/kernels/test_quantized_on_gpu.py")
@pytest.mark.parametrize("keeps_input", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_blockwise", "fp8_delayed"])
def test_kernels_that_add_both_at_once_add_what_comes_one_by_one(
    monkeypatch: pytest.MonkeyPatch, recipe: str, keeps_input: bool
) -> None:
    for module in (quantized, quantized_experts):
        monkeypatch.setattr(module, "backend_of", lambda *_: "triton")
    is_fused = recipe != "fp8_delayed"
    paired, plain = (_two_micro_batches(recipe, one, is_fused, keeps_input) for one in (True, False))
    for got, expected in zip(paired, plain, strict=True):
        assert float((got - expected).norm() / expected.norm()) < 1e-6


def _waiting_and_predicted(plan: Plan) -> tuple[list[int], float]:
    """Bytes that wait before each micro-batch of a step and after the last, and those of the simulator."""
    trainer, seen = build_trainer(0, plan, RunConfig()), list[int]()

    def micro_batch(index: int) -> Any:
        seen.append(waiting_bytes(trainer.model))
        return trainer._micro_batch(0, index)

    trainer.pipeline.run(micro_batch)
    chunks = rank_chunks(plan.model, plan.layout, 1)[0]
    expected = predicted_bytes(plan.model, plan.point, load_stack("native"), chunks)
    return [*seen, waiting_bytes(trainer.model)], expected


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current", "fp8_blockwise"])
@pytest.mark.parametrize("model", [GQA, MLA])
def test_what_waits_in_fp8_is_what_is_predicted(model: ModelSpec, precision: str) -> None:
    mixed = {"bf16_modules": ("mtp",)} if model.num_mtp_layers else {}
    plan = low_plan(model, 1, precision=precision, **BOTH, **mixed)
    seen, expected = _waiting_and_predicted(plan)
    scales = 0 if precision == "fp8_blockwise" else 4 * 4  # of whole operands, in one quantized layer
    assert seen == [*[0, expected + scales] * 2, 0]


@pytest.mark.parametrize("matrices", [("expert_fc1",), ("expert_fc2",), ("expert_fc1", "expert_fc2")])
def test_what_waits_is_what_is_predicted(matrices: tuple[str, ...]) -> None:
    plan = tiny_plan(MLA_MODEL, 1, paired_wgrad=matrices)
    seen, expected = _waiting_and_predicted(plan)
    assert seen == [*[0, expected] * 4, 0]


def test_rows_go_while_their_tokens_wait() -> None:
    trainer = build_trainer(0, tiny_plan(GQA_MODEL, 1, **BOTH), RunConfig())
    rows: list[StorageWeakRef] = []
    for experts in (one for one in trainer.model.modules() if isinstance(one, Experts)):
        experts.register_forward_pre_hook(lambda _, args: rows.append(StorageWeakRef(args[0].untyped_storage())))

    def micro_batch(index: int) -> Any:
        assert len(rows) == index
        assert all(one.expired() for one in rows)
        return trainer._micro_batch(0, index)

    trainer.pipeline.run(micro_batch)
    assert len(rows) == 8


def test_what_it_does_not_go_with() -> None:
    for changes, match in (
        ({"sharding": "full"}, "excludes sharding full"),
        ({"global_batch_size": 1}, "two micro-batches"),
    ):
        with pytest.raises(ValueError, match=match):
            Plan.model_validate(tiny_plan(GQA_MODEL, 1).model_dump() | BOTH | changes)
