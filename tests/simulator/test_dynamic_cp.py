"""Predictions of plans under dynamic context parallelism: whole sequences as the static plan, mixes by their packs."""

import random

import pytest

from moeplan.errors import InvalidInputError
from moeplan.hwprofiles.load import load_profile
from moeplan.plan import Plan
from moeplan.planner.dynamic_cp import compare_cp
from moeplan.presets import load_model
from moeplan.simulator.predict import predict, timeline
from moeplan.simulator.stack import load_stack

H100, NATIVE = load_profile("h100"), load_stack("native")
STATIC = Plan(
    model=load_model("qwen3-30b-a3b"), hardware="h100", num_gpus=64, seq_len=131072, global_batch_size=16, cp=16, ep=8
)


def dynamic(lengths: tuple[int, ...]) -> Plan:
    return STATIC.replace(dynamic_cp=True, document_lengths=lengths)


def imbalanced() -> tuple[int, ...]:
    """Log-normal lengths that fill the batch."""
    draw, lengths = random.Random(0), list[int]()
    while sum(lengths) < STATIC.tokens_per_step:
        length = min(STATIC.seq_len, max(64, int(draw.lognormvariate(8.5, 1.4))))
        lengths.append(min(length, STATIC.tokens_per_step - sum(lengths)))
    return tuple(lengths)


@pytest.mark.parametrize(
    "name, num_gpus", [("qwen3-30b-a3b", 64), ("qwen3-next-80b-a3b", 16), ("nemotron3-nano-30b-a3b", 64)]
)
def test_whole_sequences_take_and_hold_what_a_static_plan_does(name: str, num_gpus: int) -> None:
    plan = STATIC.replace(model=load_model(name), num_gpus=num_gpus)
    of_documents = plan.replace(dynamic_cp=True, document_lengths=(plan.seq_len,) * 16)
    static, packed = predict(plan, H100, NATIVE), predict(of_documents, H100, NATIVE)
    assert packed.step_s == pytest.approx(static.step_s, rel=0.01)
    assert packed.peak_memory_bytes == pytest.approx(static.peak_memory_bytes, rel=1e-9)
    for family, seconds in static.time_s.items():
        # What the host issues for messages is left out of packs.
        assert packed.time_s[family].exposed_s == pytest.approx(seconds.exposed_s, rel=0.06, abs=0.013)


def test_a_mix_takes_the_packs_that_run_and_families_add_up() -> None:
    plan = dynamic(imbalanced())
    found = predict(plan, H100, NATIVE)
    assert sum(time.exposed_s for time in found.time_s.values()) == pytest.approx(found.step_s)
    once_s = sum(found.time_s[family].exposed_s for family in ("optimizer", "dp_comm"))
    compared = compare_cp(STATIC, plan.document_lengths, H100, NATIVE)
    # By FLOPs alone a run's schedule misses the fastest by a little, and must beat the static one by far.
    assert compared.dynamic.step_s * 0.999 < found.step_s - once_s < compared.dynamic.step_s * 1.05
    assert found.step_s < 0.7 * compared.static.step_s
    assert found.time_s["bubble"].exposed_s > 0
    assert found.time_s["cp_comm"].total_s > found.time_s["cp_comm"].exposed_s


def test_more_tokens_a_rank_hold_more_memory() -> None:
    plan = dynamic(imbalanced())
    wide = plan.replace(max_tokens_per_rank=16384)
    assert predict(wide, H100, NATIVE).peak_memory_bytes > predict(plan, H100, NATIVE).peak_memory_bytes


def test_no_timeline_of_micro_batches_that_differ() -> None:
    with pytest.raises(InvalidInputError, match="dynamic_cp: got true"):
        timeline(dynamic((STATIC.seq_len,) * 16), H100, NATIVE)
