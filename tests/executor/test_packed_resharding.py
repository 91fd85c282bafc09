"""Optimizer states in fewer bits, and weights in FP8, saved at one folding and read at another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeplan.executor.tensor_slices import buffer_slices
from moeplan.executor.train import Trainer
from moeplan.run_config import RunConfig
from tests.executor.cases import build_trainer
from tests.executor.pools import Pools
from tests.executor.precision_cases import GQA, low_plan

STEPS = 2
RUN = RunConfig(steps=3, lr=1e-3, lr_warmup_steps=2)
Side = dict[str, Any]
State = dict[tuple[str, str], list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]]
# What both sides have, folding before and after, with where states are. FP8 copies of tp are of other tensors.
CASES: dict[str, tuple[Side, Side, Side]] = {
    "bf16 moments and remainders": (
        {"precision": "bf16", "moment_dtype": "bf16", "main_weight_remainders": True},
        {"num_gpus": 2, "tp": 2, "etp": 2},
        {"num_gpus": 1, "offload_optimizer_states": True},
    ),
    "fp8 moments": (
        {"precision": "bf16", "moment_dtype": "fp8"},
        {"num_gpus": 2, "ep": 2, "offload_optimizer_states": True},
        {"num_gpus": 2, "pp": 2, "optimizer_cpu_frac": 0.5},
    ),
    "fp8 moments and primary weights": (
        {"precision": "fp8_blockwise", "moment_dtype": "fp8", "fp8_primary_weights": True},
        {"num_gpus": 1},
        {"num_gpus": 2, "ep": 2, "offload_optimizer_states": True},
    ),
    "primary weights to a bf16 copy": (
        {"precision": "fp8_current"},
        {"num_gpus": 2, "ep": 2, "fp8_primary_weights": True, "moment_dtype": "bf16"},
        {"num_gpus": 2, "pp": 2, "moment_dtype": "bf16"},
    ),
}


def _states(trainer: Trainer) -> State:
    """Main weights and moments of this rank: offsets, whole shape and values of each slice."""
    found: State = {}
    for one in trainer.optimizer.classes:
        for part in one.parts:
            start = one.updated.start + part.span.start
            for kind, flat in part.flats.items():
                span = type(part.span)(start, start + part.span.size)
                for piece in buffer_slices(one.buffer, span, flat, start):
                    values = piece.values.to(torch.float32, copy=True)
                    found.setdefault((kind, piece.name), []).append((piece.offsets, piece.shape, values))
    return found


def saved(rank: int, side: Side, run: RunConfig) -> State:
    trainer = build_trainer(rank, low_plan(GQA, **side), run)
    for number in range(STEPS):
        trainer.step(number)
    assert trainer.checkpoints is not None
    trainer.checkpoints.save(STEPS)
    trainer.checkpoints.wait()
    return _states(trainer)


def resumed(rank: int, side: Side, run: RunConfig) -> tuple[State, float]:
    trainer = build_trainer(rank, low_plan(GQA, **side), run.model_copy(update={"resume": True}))
    trainer.resume()
    return _states(trainer), trainer.step(STEPS).loss


def _whole(states: list[State]) -> dict[tuple[str, str], Tensor]:
    whole: dict[tuple[str, str], Tensor] = {}
    for state in states:
        for key, slices in state.items():
            for offsets, shape, values in slices:
                target = whole.setdefault(key, torch.full(shape, float("nan")))
                target[tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))] = values
    return whole


@pytest.mark.parametrize("name", CASES)
def test_states_go_to_another_folding(pools: Pools, tmp_path: Path, name: str) -> None:
    both, before, after = CASES[name]
    run = RUN.model_copy(update={"save_folder": str(tmp_path)})

    def everywhere(function: Any, side: Side) -> list[Any]:
        return [function(0, side, run)] if side["num_gpus"] == 1 else pools[2].run(function, side, run)

    wanted = _whole(everywhere(saved, both | before))
    outcomes = everywhere(resumed, both | after)
    found = _whole([state for state, _ in outcomes])
    assert found.keys() == wanted.keys()
    is_fp8 = both.get("moment_dtype") == "fp8"
    for (kind, tensor), values in wanted.items():
        assert not values.isnan().any(), tensor
        if kind == "weight" or not is_fp8:
            torch.testing.assert_close(found[kind, tensor], values, rtol=0, atol=0, msg=f"{kind} of {tensor}")
        else:  # rounded twice to 3 bits of a number, or of a root, under blocks that begin elsewhere
            step = values.abs().amax() * 2**-8
            torch.testing.assert_close(found[kind, tensor], values, rtol=0.3, atol=float(step), msg=tensor)
    assert all(loss == outcomes[0][1] > 0 for _, loss in outcomes)
