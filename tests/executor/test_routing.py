"""Experts forced level, recorded and replayed, and losses against the load of the whole step."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeplan.errors import InvalidInputError
from moeplan.executor.check import check_run
from moeplan.executor.mesh import build_mesh
from moeplan.executor.parameters import ParameterTable
from moeplan.executor.router import Router
from moeplan.kernels.router import count_tokens
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, MLA_MODEL, build_trainer, tiny_plan
from tests.executor.gloo_pool import GlooPool, gloo_pool

assert GQA_MODEL.moe is not None
NUM_EXPERTS = GQA_MODEL.moe.num_experts
STEPS = 2


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(4, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


def losses(rank: int, plan: Plan, run: RunConfig) -> list[float]:
    """Of some steps and of one validation, which no record touches."""
    trainer = build_trainer(rank, plan, run)
    results = [trainer.step(number).loss for number in range(STEPS)]
    return [*results, trainer.evaluate()]


def recorded(folder: Path, plan: Plan) -> dict[str, Tensor]:
    """Indices [step, place in the batch, K] of each router, from every rank's file."""
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        for file in (folder / f"step-{step + 1:08d}").iterdir():
            record = torch.load(file, weights_only=True)
            places = record.pop("places").flatten()
            for name, index in record.items():
                rows = found.setdefault(name, torch.full((STEPS, plan.tokens_per_step, index.shape[2]), -1).short())
                rows[step, places] = index.flatten(0, 1)
    return found


FOLDINGS = [{"tp": 2, "ep": 4}, {"cp": 2, "pp": 2, "ep": 2}, {"ep": 2, "mbs": 2}]


@pytest.mark.parametrize("folding", FOLDINGS)
@pytest.mark.parametrize("model", [GQA_MODEL, MLA_MODEL])
def test_a_record_holds_every_token_and_replays_under_any_folding(
    pool: GlooPool, tmp_path: Path, model: ModelSpec, folding: dict[str, int]
) -> None:
    alone, folded = tiny_plan(model, 1), tiny_plan(model, 4, **folding)
    first = losses(0, alone, RunConfig(eval_every=1, record_routing=str(tmp_path / "alone")))
    expected = recorded(tmp_path / "alone", alone)
    assert list(expected) == ["layers.1.router"]
    assert int(expected["layers.1.router"].min()) >= 0
    # Another seed has other weights, which would choose otherwise.
    other = RunConfig(
        eval_every=1, seed=7, record_routing=str(tmp_path / "other"), replay_routing=str(tmp_path / "alone")
    )
    assert pool.run(losses, folded, other)[0] != first
    again = recorded(tmp_path / "other", folded)
    assert torch.equal(again["layers.1.router"], expected["layers.1.router"])
    # The run of the record itself is the same with and without.
    replayed = losses(0, alone, RunConfig(eval_every=1, replay_routing=str(tmp_path / "other")))
    assert replayed == first


def test_recompute_takes_the_same_experts_again(tmp_path: Path) -> None:
    plain, again = tiny_plan(GQA_MODEL, 1), tiny_plan(GQA_MODEL, 1, recompute=("full",))
    run = RunConfig(eval_every=1, force_balance=True)
    torch.testing.assert_close(losses(0, plain, run), losses(0, again, run), rtol=0, atol=1e-12)


def test_forced_balance_is_level_in_expectation(tmp_path: Path) -> None:
    plan = tiny_plan(GQA_MODEL, 1, global_batch_size=64, seq_len=64)
    losses(0, plan, RunConfig(eval_every=1, force_balance=True, record_routing=str(tmp_path)))
    index = recorded(tmp_path, plan)["layers.1.router"]
    assert (index[..., 0] != index[..., 1]).all()
    mean = index.numel() / NUM_EXPERTS  # 2048, whose deviation is 42
    counts = torch.bincount(index.flatten().long(), minlength=NUM_EXPERTS)
    assert ((counts - mean).abs() < 0.1 * mean).all()
    assert not torch.equal(index[0], index[1])


def test_records_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    plan = tiny_plan(GQA_MODEL, 1)
    with pytest.raises(InvalidInputError, match="has no record"):
        losses(0, plan, RunConfig(eval_every=1, replay_routing=str(tmp_path)))
    losses(0, plan, RunConfig(eval_every=1, record_routing=str(tmp_path)))
    with pytest.raises(InvalidInputError, match="has 128 of the 256 tokens of rank 0"):
        losses(0, tiny_plan(GQA_MODEL, 1, global_batch_size=16), RunConfig(eval_every=1, replay_routing=str(tmp_path)))
    deeper = GQA_MODEL.model_copy(update={"num_layers": 3})
    with pytest.raises(InvalidInputError, match=r"step 1 has no layers\.2\.router"):
        losses(0, tiny_plan(deeper, 1), RunConfig(eval_every=1, replay_routing=str(tmp_path)))


def test_what_cannot_be_replayed_is_said_before_the_run(tmp_path: Path) -> None:
    run = RunConfig(steps=6, replay_routing=str(tmp_path))
    with pytest.raises(InvalidInputError, match="step-00000006 is not there, of a run of 6 steps"):
        check_run(run)
    (tmp_path / "step-00000006").mkdir()
    check_run(run)
    with pytest.raises(InvalidInputError, match="force_balance: got true with replay_routing"):
        check_run(run.model_copy(update={"force_balance": True}))


MICRO_BATCHES, COEFF = 3, 0.5


def global_model() -> ModelSpec:
    assert GQA_MODEL.moe is not None
    router = GQA_MODEL.moe.router.model_copy(
        update={"aux_loss": "global_aux_loss", "aux_loss_coeff": COEFF, "z_loss_coeff": 0.0}
    )
    return GQA_MODEL.model_copy(update={"moe": GQA_MODEL.moe.model_copy(update={"router": router})})


def batches(plan: Plan) -> Tensor:
    """Inputs by micro-batch and rank [.., L, H]."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, MICRO_BATCHES, plan.num_gpus, plan.tokens_per_rank, plan.model.hidden_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def make_router(rank: int, plan: Plan) -> Router:
    table = ParameterTable(torch.device("cpu"), torch.float64, 0)
    assert plan.model.moe is not None
    return Router(plan, plan.model.moe, "router", build_mesh(plan.folding, rank), table)


def router_grads(rank: int, plan: Plan) -> list[Tensor]:
    """Gradient of the router's weight, from its balancing loss alone, in each of two steps."""
    router = make_router(rank, plan)
    grads: list[Tensor] = []
    for step in batches(plan):
        router.zero_grad()
        for x_PLH in step:
            (router(x_PLH[rank])[1].probs_TK * 0).sum().backward()
        assert router.weight.grad is not None
        grads.append(router.weight.grad)
        router.end_step()
    return grads


@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, {"cp": 4}])
def test_global_loss_counts_the_step_so_far_over_all_ranks(pool: GlooPool, degrees: dict[str, int]) -> None:
    dp = 4 // (degrees.get("tp", 1) * degrees.get("cp", 1))
    plan = tiny_plan(global_model(), 4, global_batch_size=MICRO_BATCHES * dp, **degrees)
    ranks = pool.run(router_grads, plan)
    router = make_router(0, tiny_plan(global_model(), 1, global_batch_size=MICRO_BATCHES))
    top_k = router.options.top_k
    for step, inputs in enumerate(batches(plan)):
        router.zero_grad()
        seen_E = torch.zeros(NUM_EXPERTS, dtype=torch.float64)
        for batch, x_PLH in enumerate(inputs):
            x_TH = x_PLH.flatten(0, 1)
            logits_TE = x_TH @ router.weight.t()
            share_TE = logits_TE.softmax(1)
            seen_E += count_tokens(logits_TE.topk(top_k, 1).indices, NUM_EXPERTS)[0]
            frac_E = seen_E / ((batch + 1) * len(x_TH) * top_k)
            # The mean over dp ranks of coeff * E * sum f P is that with P over the tokens of all of them.
            loss = COEFF * NUM_EXPERTS * (frac_E * share_TE.mean(0)).sum() / MICRO_BATCHES
            loss.backward()
        assert router.weight.grad is not None
        got = torch.stack([grads[step] for grads in ranks]).sum(0)
        torch.testing.assert_close(got, router.weight.grad, rtol=0, atol=1e-12)


def test_a_forward_changes_only_tensors_and_in_place() -> None:
    """As a CUDA graph needs it, which repeats what the device did and nothing that the host did."""

    def state() -> dict[str, object]:
        found = {name: value for name, value in vars(router).items() if not name.startswith("_")}
        return {name: one.data_ptr() if isinstance(one, Tensor) else one for name, one in found.items()}

    plan = tiny_plan(global_model(), 1)
    router = make_router(0, plan)
    before = state()
    router(batches(plan)[0, 0, 0])
    assert state() == before
    assert router.num_summed == 1
