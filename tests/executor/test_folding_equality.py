"""Folded runs on four processes against one process, in float64: the same losses and the same weights."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from tests.executor.cases import DENSE_MODEL, GQA_MODEL, MLA_MODEL, Outcome, build_trainer, run_steps, tiny_plan
from tests.executor.gloo_pool import GlooPool, gloo_pool

STEPS = 10
TOLERANCE = 1e-9
# Clipping is active: the norm of a fresh model's gradient is near 3.
RUN = RunConfig(steps=STEPS, lr=3e-3, lr_warmup_steps=2, clip_grad_norm=0.5)

FOLDINGS = {
    "dp4 x ep4": {"ep": 4},
    "dp4 x ep2 edp2": {"ep": 2},
    "tp2 dp2 x ep4": {"tp": 2, "ep": 4},
    "tp2 dp2 x etp2 ep2": {"tp": 2, "etp": 2, "ep": 2},
    "dp4 x etp2 edp2": {"etp": 2},
    "tp2 dp2 x etp4": {"tp": 2, "etp": 4},
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(4, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


@lru_cache
def alone(model: ModelSpec, run: RunConfig, mbs: int) -> Outcome:
    """The run on one process, without a process group."""
    return run_steps(0, tiny_plan(model, 1, mbs=mbs), run, STEPS)


def assert_same(alone: Outcome, ranks: list[Outcome]) -> None:
    whole = {part.name: part.values for part in alone.parts}
    seen = {name: torch.zeros(values.shape, dtype=torch.bool) for name, values in whole.items()}
    for outcome in ranks:
        torch.testing.assert_close(outcome.losses, alone.losses, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(outcome.grad_norms, alone.grad_norms, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(outcome.biases, alone.biases, rtol=0, atol=0)
        for part in outcome.parts:
            expected = whole[part.name][part.source]
            torch.testing.assert_close(part.values, expected, rtol=0, atol=TOLERANCE, msg=f"{part.name} differs")
            seen[part.name][part.source] = True
    assert all(bool(mask.all()) for mask in seen.values()), "some weight is on no rank"


@pytest.mark.parametrize("folding", FOLDINGS)
def test_folded_equals_alone(pool: GlooPool, folding: str) -> None:
    plan = tiny_plan(GQA_MODEL, 4, **FOLDINGS[folding])
    assert_same(alone(GQA_MODEL, RUN, 1), pool.run(run_steps, plan, RUN, STEPS))


@pytest.mark.parametrize("folding", ["dp4 x ep2 edp2", "tp2 dp2 x etp2 ep2"])
def test_unsharded_optimizer_equals_alone(pool: GlooPool, folding: str) -> None:
    plan = tiny_plan(GQA_MODEL, 4, sharding="none", **FOLDINGS[folding])
    assert_same(alone(GQA_MODEL, RUN, 1), pool.run(run_steps, plan, RUN, STEPS))


@pytest.mark.parametrize("folding", ["dp4 x ep4", "tp2 dp2 x ep4", "tp2 dp2 x etp2 ep2"])
def test_latent_attention_and_sigmoid_router(pool: GlooPool, folding: str) -> None:
    plan = tiny_plan(MLA_MODEL, 4, memory_efficient_permutation=False, mbs=2, **FOLDINGS[folding])
    assert_same(alone(MLA_MODEL, RUN, 2), pool.run(run_steps, plan, RUN, STEPS))


@pytest.mark.parametrize("tp", [1, 4])
def test_dense_model(pool: GlooPool, tp: int) -> None:
    plan = tiny_plan(DENSE_MODEL, 4, tp=tp, mbs=2, recompute=("mlp", "layernorm"))
    assert_same(alone(DENSE_MODEL, RUN, 2), pool.run(run_steps, plan, RUN, STEPS))


def test_bf16_with_fp32_main_weights_stays_near_float64(pool: GlooPool) -> None:
    plan = tiny_plan(GQA_MODEL, 4, precision="bf16", tp=2, ep=4)
    for outcome in pool.run(run_steps, plan, RUN, STEPS):
        # 8 bits of mantissa: 0.4 % of a loss of 5.5, and rounding may send a token to another expert.
        torch.testing.assert_close(outcome.losses, alone(GQA_MODEL, RUN, 1).losses, rtol=0, atol=0.03)


def test_loss_falls_and_clipping_is_active() -> None:
    outcome = alone(GQA_MODEL, RUN, 1)
    assert min(outcome.grad_norms) > RUN.clip_grad_norm
    assert outcome.losses[-1] < outcome.losses[0] - 0.1


@pytest.mark.parametrize(
    "model,recompute",
    [
        (GQA_MODEL, ("full",)),
        (GQA_MODEL, ("core_attn", "mlp", "moe")),
        (GQA_MODEL, ("layernorm", "moe_act", "shared_experts")),
        (GQA_MODEL, ("layernorm", "mlp", "moe")),
        (MLA_MODEL, ("layernorm", "mla_up_proj", "moe_act", "mlp")),
    ],
)
def test_recompute_changes_nothing(pool: GlooPool, model: ModelSpec, recompute: tuple[str, ...]) -> None:
    plan = tiny_plan(model, 4, tp=2, etp=2, ep=2, recompute=recompute)
    assert_same(alone(model, RUN, 1), pool.run(run_steps, plan, RUN, STEPS))


@pytest.mark.parametrize("folding", [{"pp": 2, "ep": 2}, {"ep": 4, "ep_overlap": True, "delay_wgrad": True}])
def test_gradients_added_in_pairs_change_nothing(pool: GlooPool, folding: dict[str, Any]) -> None:
    plan = tiny_plan(GQA_MODEL, 4, paired_wgrad=("expert_fc1", "expert_fc2"), **folding)
    assert_same(alone(GQA_MODEL, RUN, 1), pool.run(run_steps, plan, RUN, STEPS))


def starve(rank: int, plan: Plan, run: RunConfig) -> tuple[list[float], list[Tensor]]:
    """Two steps in which the selection bias sends every token to the first two experts: losses and expert weights."""
    trainer = build_trainer(rank, plan, run)
    before = [entry.parameter.detach().clone() for entry in trainer.model.table.entries if entry.is_expert]
    for router in trainer.model.routers():
        assert router.bias_E is not None
        router.bias_E[:2] = 100.0
    losses = [trainer.step(number).loss for number in range(2)]
    after = [entry.parameter.detach() for entry in trainer.model.table.entries if entry.is_expert]
    return losses, [new - old for new, old in zip(after, before, strict=True)]


def test_ranks_that_get_no_token(pool: GlooPool) -> None:
    assert MLA_MODEL.moe is not None
    one_group = MLA_MODEL.moe.router.model_copy(update={"num_groups": 1, "top_groups": 1})
    model = MLA_MODEL.model_copy(update={"moe": MLA_MODEL.moe.model_copy(update={"router": one_group})})
    run = RunConfig(weight_decay=0.0)
    results = pool.run(starve, tiny_plan(model, 4, ep=4), run)
    expected, _ = starve(0, tiny_plan(model, 1), run)
    for rank, (losses, changes) in enumerate(results):
        torch.testing.assert_close(losses, expected, rtol=0, atol=TOLERANCE)
        # Experts 0 and 1 are rank 0's; the others saw nothing and stay as they were.
        assert all(bool((change != 0).any()) == (rank == 0) for change in changes)
