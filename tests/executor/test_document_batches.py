"""Sequences whose documents are kept apart, against each document by itself, in float64."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from moeplan.errors import InvalidInputError
from moeplan.executor.check import check_places
from moeplan.executor.document_batches import lengths_of
from moeplan.executor.micro_batch import NO_TARGET, cut_micro_batch
from moeplan.executor.train import Trainer
from moeplan.model_spec import ModelSpec
from moeplan.run_config import RunConfig
from tests.executor.cases import DENSE_MODEL, build_trainer, tiny_plan
from tests.executor.folding_cases import MODELS, RUN, TOLERANCE, Ran, assert_same_run, ran_steps
from tests.executor.pools import Pools
from tests.executor.test_token_file import write_pair

SEQ_LEN = 16


def separated(folder: Path, **changes: Any) -> RunConfig:
    """Documents of 1 to 20 tokens."""
    draw = random.Random(3)
    prefix = folder / "text"
    if not prefix.with_suffix(".bin").exists():
        write_pair(folder, [draw.randrange(1, 21) for _ in range(200)])
    return RUN.model_copy(update={"data": str(prefix), "separate_documents": True, **changes})


def loss_alone(model: ModelSpec, run: RunConfig, ids: torch.Tensor) -> float:
    """Summed loss of predicting each id but the first, in a plan that has nothing else."""
    plan = tiny_plan(model, 1, seq_len=len(ids) - 1, global_batch_size=1)
    trainer = build_trainer(0, plan, run.model_copy(update={"separate_documents": False}))
    return float(trainer.pipeline.evaluate(lambda _: cut_micro_batch(ids[:-1], ids[1:], plan, trainer.mesh.cp))[0])


@pytest.mark.parametrize("model", ["gqa", "windowed", "delta-net", "nemotron"])
def test_the_loss_is_the_mean_over_documents_by_themselves(tmp_path: Path, model: str) -> None:
    run = separated(tmp_path)
    trainer = build_trainer(0, tiny_plan(MODELS[model], 1, global_batch_size=3, mbs=3), run)
    losses, num_targets = 0.0, 0
    for index in range(3):
        ids, ends = trainer.tokens.sequence(0, index), trainer.tokens.ends(0, index)
        bounds = [0, *ends, *[SEQ_LEN + 1] * (SEQ_LEN not in ends)]
        for start, end in pairwise(bounds):
            if end - start > 1:
                losses += loss_alone(MODELS[model], run, ids[start:end])
                num_targets += end - start - 1
    assert num_targets < 3 * SEQ_LEN
    assert trainer.step(0).loss == pytest.approx(losses / num_targets, abs=TOLERANCE)


def summed_loss(trainer: Trainer) -> float:
    """The loss of the first step, with gradients but no update."""
    num_targets = trainer._begin_batch(lambda index: trainer.tokens.ends(0, index))
    return float(trainer.pipeline.run(lambda index: trainer._micro_batch(0, index))[0]) / num_targets


def test_gradients_are_those_of_the_loss(tmp_path: Path) -> None:
    trainer = build_trainer(0, tiny_plan(DENSE_MODEL, 1, global_batch_size=2), separated(tmp_path))
    summed_loss(trainer)
    buffer = trainer.optimizer.classes[0].buffer
    grads = buffer.reduced_grads().clone()
    for place in grads.abs().topk(3).indices.tolist():
        sides = []
        for shift in (1e-5, -2e-5):
            buffer.weights[place] += shift
            sides.append(summed_loss(trainer))
        buffer.weights[place] += 1e-5
        assert (sides[0] - sides[1]) / 2e-5 == pytest.approx(float(grads[place]), rel=1e-5)


def run_separated(rank: int, model: str, num_gpus: int, changes: dict[str, Any], run: RunConfig) -> tuple[Ran, float]:
    trainer = build_trainer(rank, tiny_plan(MODELS[model], num_gpus, **changes), run)
    return ran_steps(trainer, range(2)), trainer.evaluate()


@pytest.mark.parametrize(
    "model, changes",
    [
        ("gqa", {"tp": 2, "mbs": 2}),
        ("delta-net", {"tp": 2}),
        ("mla", {"pp": 2}),
        ("mla", {"ep": 2, "recompute": ("full",)}),
    ],
)
def test_folded_equals_alone(pools: Pools, tmp_path: Path, model: str, changes: dict[str, Any]) -> None:
    run = separated(tmp_path, eval_every=1)
    alone, expected = run_separated(0, model, 1, {"mbs": changes.get("mbs", 1)}, run)
    outcomes = pools[2].run(run_separated, model, 2, changes, run)
    assert_same_run(alone, [outcome for outcome, _ in outcomes])
    assert [loss for _, loss in outcomes] == pytest.approx([expected] * 2, abs=TOLERANCE)


def test_without_an_end_in_it_a_sequence_trains_as_it_is(tmp_path: Path) -> None:
    write_pair(tmp_path, [5000])
    run = separated(tmp_path)
    plan = tiny_plan(MODELS["mla"], 1)
    plain = build_trainer(0, plan, run.model_copy(update={"separate_documents": False}))
    apart = build_trainer(0, plan, run)
    assert apart.step(0).grad_norm == pytest.approx(plain.step(0).grad_norm, abs=TOLERANCE)


def test_depths_predict_inside_documents_alone(tmp_path: Path) -> None:
    trainer = build_trainer(0, tiny_plan(MODELS["gqa"], 1, mbs=2), separated(tmp_path))
    assert trainer.documents is not None
    ids = torch.arange(1, 18)
    both = torch.cat([ids[:-1], 100 + ids[:-1]]), torch.cat([ids[1:], 100 + ids[1:]])
    batch = trainer.documents.cut(*both, [(3, 16), ()])
    assert batch.layout is not None
    assert batch.layout.documents == (3, 13, 16)
    none = NO_TARGET
    assert batch.targets[0].tolist() == [2, 3, none, *range(5, 17), none, *range(102, 118)]
    assert batch.tokens[1].tolist() == [2, 3, 0, *range(5, 17), 0, *range(102, 118)]
    assert batch.targets[1].tolist() == [3, none, none, *range(6, 17), none, none, *range(103, 118), none]


def test_lengths_of_documents() -> None:
    assert lengths_of((), 8) == [8]
    assert lengths_of((1, 5), 8) == [1, 4, 3]
    assert lengths_of((8,), 8) == [8]  # the next sequence begins another


@pytest.mark.parametrize("changes", [{"cp": 2}, {"packed_lengths": (8, 8)}, {"cuda_graph": ("full_iteration",)}])
def test_what_needs_equal_documents_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = separated(tmp_path)
    plan = tiny_plan(DENSE_MODEL, 2, **changes)
    with pytest.raises(InvalidInputError, match=f"separate_documents: got true with {next(iter(changes))}"):
        check_places(plan, run)
    check_places(plan, run.model_copy(update={"separate_documents": False}))
