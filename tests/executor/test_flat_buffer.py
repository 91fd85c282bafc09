"""Where parameters lie in flat buffers, and that what fills the gaps changes nothing."""

from pathlib import Path
from typing import Any

import pytest

from moeplan.executor.flat_buffer import ALIGNMENT_BYTES, FlatBuffer
from moeplan.executor.primary_weights import PrimaryBuffer
from moeplan.model_spec import ModelSpec
from moeplan.plan import Plan
from moeplan.run_config import RunConfig
from tests.executor.cases import GQA_MODEL, build_trainer, tiny_plan
from tests.executor.folding_cases import RUN, TOLERANCE, assert_same_run, ran_steps
from tests.executor.pools import Pools


def with_sinks(num_heads: int) -> ModelSpec:
    """One for each head; what comes after them would begin elsewhere."""
    changes = {"num_heads": num_heads, "num_kv_heads": num_heads, "sinks": True}
    return GQA_MODEL.model_copy(update={"attention": GQA_MODEL.attention.model_copy(update=changes)})


ODD = with_sinks(5)  # no whole word in any type


def misplaced(buffer: FlatBuffer) -> list[str]:
    """What does not begin at a whole word: parameters, their gradients, what travels for them, this rank's part."""
    width = buffer.stored.element_size() if isinstance(buffer, PrimaryBuffer) else buffer.weights.element_size()
    starts = {entry.pieces[0].name: span.start for entry, span in buffer.spans()}
    starts |= {"part": buffer.updated.start, "own": buffer.own.start}
    for (entry, span), main in zip(buffer.spans(), buffer.main_grads, strict=True):
        assert entry.parameter.storage_offset() == span.start == main.total.storage_offset()
    return [name for name, start in starts.items() if start * width % ALIGNMENT_BYTES]


def placed(rank: int, plan: Plan) -> list[str]:
    trainer = build_trainer(rank, plan, RunConfig())
    return [name for one in trainer.optimizer.classes for name in misplaced(one.buffer)]


@pytest.mark.parametrize("changes", [{"sharding": "optimizer"}, {"sharding": "full"}, {"sharding": "none", "tp": 2}])
def test_every_parameter_and_part_begins_at_a_whole_word(pools: Pools, changes: dict[str, Any]) -> None:
    model = with_sinks(6) if "tp" in changes else ODD
    assert pools[2].run(placed, tiny_plan(model, 2, precision="bf16", **changes)) == [[], []]


def test_parts_on_the_host_end_at_a_whole_word() -> None:
    trainer = build_trainer(0, tiny_plan(ODD, 1, precision="bf16", optimizer_cpu_frac=0.3), RunConfig())
    for one in trainer.optimizer.classes:
        assert not any(part.span.start * part.weights.element_size() % ALIGNMENT_BYTES for part in one.parts)


def test_quantized_weights_begin_at_a_whole_word_of_their_bytes() -> None:
    plan = tiny_plan(ODD, 1, precision="fp8_current", fp8_primary_weights=True)
    assert not placed(0, plan)


def run_odd(rank: int, num_gpus: int, changes: dict[str, Any]) -> Any:
    return ran_steps(build_trainer(rank, tiny_plan(ODD, num_gpus, **changes), RUN), range(2))


@pytest.mark.parametrize("changes", [{"sharding": "full"}, {"sharding": "optimizer", "ep": 2}])
def test_gaps_train_like_no_gaps(pools: Pools, changes: dict[str, Any]) -> None:
    alone = run_odd(0, 1, {"sharding": "none"})
    assert_same_run(alone, pools[2].run(run_odd, 2, changes))


def save_odd(rank: int, run: RunConfig) -> None:
    trainer = build_trainer(rank, tiny_plan(ODD, 2, sharding="full"), run)
    assert trainer.checkpoints is not None
    trainer.step(0)
    trainer.checkpoints.save(1)


def test_checkpoints_know_no_gaps(pools: Pools, tmp_path: Path) -> None:
    run = RUN.model_copy(update={"save_folder": str(tmp_path), "steps": 20})
    pools[2].run(save_odd, run)
    trainer = build_trainer(0, tiny_plan(ODD, 1, sharding="none", optimizer_cpu_frac=0.3), run)
    trainer.resume()
    assert trainer.step(1).loss == pytest.approx(run_odd(0, 1, {}).losses[1], abs=TOLERANCE)
