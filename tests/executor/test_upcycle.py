"""An upcycled model computes what its dense checkpoint does, and is made from nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moeplan.errors import InvalidInputError
from moeplan.executor.check import check_init_from
from moeplan.executor.export_hf import export_hf
from moeplan.executor.first_weights import first_weights
from moeplan.executor.mesh import build_mesh
from moeplan.executor.model import Transformer
from moeplan.model_spec import ModelSpec, Moe, Router
from moeplan.run_config import RunConfig
from moeplan.upcycling import upcycling
from tests.executor.cases import tiny_plan
from tests.executor.hf_models import GQA, SIGMOID, of_family, spread

DENSE = of_family("qwen3")


def transformer(model: ModelSpec, run: RunConfig) -> Transformer:
    plan = tiny_plan(model, 1, precision="fp32")
    return Transformer(plan, build_mesh(plan.folding, 0), run.seed, torch.device("cpu"), first_weights(plan, run))


@pytest.fixture
def dense(tmp_path: Path) -> tuple[Transformer, RunConfig]:
    """A dense model, and a run that begins as it."""
    made = transformer(DENSE, RunConfig())
    spread(list(made.parameters()))
    export_hf(made.plan, made.mesh, made, tmp_path / "dense")
    return made, RunConfig(init_from=str(tmp_path / "dense"), upcycle=True, seed=5)


def upcycled(moe: Moe, **changes: Any) -> ModelSpec:
    return DENSE.model_copy(update={"name": "upcycled", "moe": moe} | changes)


@pytest.mark.parametrize(
    "moe",
    [
        Moe(num_experts=4, top_k=2, expert_ffn_size=48),
        Moe(num_experts=8, top_k=4, expert_ffn_size=24),
        Moe(num_experts=12, top_k=3, expert_ffn_size=16),
        Moe(num_experts=8, top_k=4, expert_ffn_size=24, router=SIGMOID),
        Moe(num_experts=4, top_k=2, expert_ffn_size=48, router=Router(num_groups=2, top_groups=1, scaling_factor=2.5)),
    ],
    ids=["copies", "halves", "thirds-of-one-copy", "sigmoid", "scaled-groups"],
)
@pytest.mark.parametrize("num_dense_layers", [0, 1])
def test_the_first_logits_are_those_of_the_dense_model(
    moe: Moe, num_dense_layers: int, dense: tuple[Transformer, RunConfig]
) -> None:
    one, run = dense
    model = upcycled(moe, num_dense_layers=num_dense_layers)
    check_init_from(tiny_plan(model, 1), run)
    other = transformer(model, run)
    ids = torch.randint(0, 256, (32,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = one.logits(ids)
        torch.testing.assert_close(other.logits(ids), expected, rtol=1e-5, atol=1e-5)
    assert float(expected.std()) > 0.1


def test_layers_of_one_block_are_upcycled_where_they_are_dense(tmp_path: Path) -> None:
    spec = of_family("nemotron_h")
    one = transformer(spec.model_copy(update={"layer_pattern": "M-M*--", "moe": None}), RunConfig())
    spread(list(one.parameters()))
    export_hf(one.plan, one.mesh, one, tmp_path)
    run = RunConfig(init_from=str(tmp_path), upcycle=True, seed=5)
    moe = Moe(num_experts=8, top_k=4, expert_ffn_size=24, router=SIGMOID)
    model = spec.model_copy(update={"layer_pattern": "MEM*-E", "moe": moe})
    check_init_from(tiny_plan(model, 1), run)
    ids = torch.randint(0, 256, (32,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(transformer(model, run).logits(ids), one.logits(ids), rtol=1e-5, atol=1e-5)
    latent = model.model_copy(update={"moe": moe.model_copy(update={"latent_size": 12})})
    with pytest.raises(InvalidInputError, match="latent_size: got 12, allowed: none"):
        check_init_from(tiny_plan(latent, 1), run)


def test_copies_are_routed_apart_and_shards_together(dense: tuple[Transformer, RunConfig]) -> None:
    _, run = dense
    model = upcycled(Moe(num_experts=8, top_k=4, expert_ffn_size=24))
    (router, _) = transformer(model, run).routers()
    first, second = router.weight.detach().chunk(2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert len(first.unique(dim=0)) == 4


def test_factors_make_up_for_the_weights_of_the_router() -> None:
    halves = Moe(num_experts=8, top_k=4, expert_ffn_size=24)
    made = upcycling(upcycled(halves), 48)
    assert (made.granularity, made.num_copies) == (2, 4)
    assert made.up_factor * made.down_factor == pytest.approx(2)
    squared = upcycling(upcycled(halves, activation="squared_relu"), 48)
    assert squared.up_factor**2 * squared.down_factor == pytest.approx(2)
    # Report section 8: expansion * G**2 / K where softmax is over all experts.
    unnormalised = upcycling(upcycled(halves.model_copy(update={"router": Router(normalize_top_k=False)})), 48)
    assert unnormalised.up_factor * unnormalised.down_factor == pytest.approx(4 * 2**2 / 4)


MOE = Moe(num_experts=8, top_k=4, expert_ffn_size=24)


@pytest.mark.parametrize(
    "model, message",
    [
        (DENSE, "got a checkpoint of a dense model for a plan of a dense model"),
        (
            upcycled(MOE.model_copy(update={"expert_ffn_size": 20})),
            "expert_ffn_size: got 20, allowed: divisors of .* 48",
        ),
        (upcycled(MOE.model_copy(update={"expert_ffn_size": 96})), "expert_ffn_size: got 96"),
        (upcycled(MOE.model_copy(update={"top_k": 3})), "top_k: got 3, allowed: multiples of 2"),
        (upcycled(MOE.model_copy(update={"num_experts": 9})), "num_experts: got 9"),
        (upcycled(MOE.model_copy(update={"shared_ffn_size": 8})), "shared_ffn_size: got 8, allowed: none"),
        (
            upcycled(MOE.model_copy(update={"router": Router(num_groups=2, top_groups=2)})),
            "router.num_groups: got 2, allowed: 1",
        ),
        (upcycled(MOE, num_mtp_layers=1), "num_mtp_layers: got 1, allowed: 0"),
        (upcycled(MOE, attention=GQA), "holds another model: attention.qk_norm is True there and False in the plan"),
        (upcycled(MOE, num_dense_layers=1, dense_ffn_size=40), "dense_ffn_size is 48 there and 40 in the plan"),
    ],
)
def test_what_cannot_be_upcycled(model: ModelSpec, message: str, dense: tuple[Transformer, RunConfig]) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        check_init_from(tiny_plan(model, 1), dense[1])
    assert caught.value.hint


def test_upcycle_needs_a_checkpoint() -> None:
    with pytest.raises(InvalidInputError, match="upcycle: got true without init_from"):
        check_init_from(tiny_plan(upcycled(MOE), 1), RunConfig(upcycle=True))
