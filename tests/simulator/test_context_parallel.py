"""Kinds of context parallelism: bytes they move, what overlaps, what they hold (report section 6)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moeplan.hwprofiles.load import load_profile
from moeplan.model_spec import MOE_LAYER
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.backward_ops import backward_ops
from moeplan.simulator.graph import phase_time
from moeplan.simulator.layer_ops import forward_ops
from moeplan.simulator.memory import memory_by_rank
from moeplan.simulator.op import Op
from moeplan.simulator.op_shapes import OpShape, Part
from moeplan.simulator.predict import predict
from moeplan.simulator.stack import load_stack

H100, BRIDGE = load_profile("h100"), load_stack("megatron-bridge-26.08")
DEEPSEEK, QWEN = load_model("deepseek-v3"), load_model("qwen3-235b-a22b")
KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")


def plan_of(cp_comm: str = "p2p", **changes: Any) -> Plan:
    """DeepSeek-V3 at 64K on 256 H100, its sequence over 16 ranks."""
    fields = {"model": DEEPSEEK, "hardware": "h100", "num_gpus": 256, "seq_len": 65536, "global_batch_size": 512}
    size = {"cp_a2a_size": 4} if cp_comm == "a2a+p2p" else {}
    degrees = {"pp": 8, "vp": 4, "ep": 32, "cp": 16, "stack": BRIDGE.name, "cp_comm": cp_comm}
    return Plan.model_validate(fields | degrees | size | changes)


def ops_of(plan: Plan, *, backward: bool = False) -> dict[str, Op]:
    shape = OpShape.of(plan.point, BRIDGE, H100)
    forward = forward_ops(plan.model, Part(MOE_LAYER, 10), shape, BRIDGE)
    return {op.name: op for op in (backward_ops(forward, shape, BRIDGE.time) if backward else forward)}


def exposed_s(plan: Plan) -> float:
    return predict(plan, H100, BRIDGE).time_s["cp_comm"].exposed_s


def test_a_ring_passes_keys_and_values_of_all_heads_step_by_step() -> None:
    ring = ops_of(plan_of())["cp_exchange"]
    one_step = 65536 / 16 * 128 * (192 + 128) * 2  # (s / cp) x heads x (key + value dim) x BF16
    assert (ring.num_messages, ring.comm_bytes) == (15, 15 * one_step)
    grouped = ops_of(plan_of(model=QWEN, tp=4, cp=4, pp=4))["cp_exchange"]
    assert grouped.comm_bytes == 3 * 65536 / 4 * (4 / 4) * 256 * 2
    assert ops_of(plan_of(), backward=True)["cp_exchange.dgrad"].comm_bytes == 2 * ring.comm_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_does_the_same_arithmetic(kind: str) -> None:
    plain, found = ops_of(plan_of(cp=1, pp=8)), ops_of(plan_of(kind))
    cores = [op for op in found.values() if op.kind == "attention"]
    assert sum(op.flops for op in cores) == pytest.approx(plain["attention_core"].flops / 16)
    again = ops_of(plan_of(kind), backward=True)
    backward = sum(op.flops for op in again.values() if op.kind == "attention")
    assert backward == pytest.approx(plain["attention_core"].flops / 16 * (3 * 192 + 2 * 128) / (192 + 128))


def test_steps_of_a_ring_cost_the_longer_of_chunk_and_message() -> None:
    """(r - 1) max(chunk, message) + chunk."""
    for seq_len in (4096, 65536):
        plan = plan_of(seq_len=seq_len)
        shape = OpShape.of(plan.point, BRIDGE, H100)
        phase = phase_time(forward_ops(DEEPSEEK, Part(MOE_LAYER, 10), shape, BRIDGE), H100, BRIDGE.time, ())
        runs = {run.op.name: run for run in phase.runs}
        chunk_s, message_s = runs["attention_core_last"].cost.seconds, runs["cp_exchange"].cost.seconds / 15
        taken_s = runs["attention_core_last"].end_s - runs["attention_core"].start_s
        assert taken_s == pytest.approx(15 * max(chunk_s, message_s) + chunk_s, rel=1e-6)


def test_gathering_is_exposed_where_a_ring_hides() -> None:
    inside: dict[str, Any] = {"tp": 1, "cp": 8, "pp": 8}  # one NVLink domain
    ring, gathered = plan_of(**inside), plan_of("all_gather", **inside)
    assert exposed_s(ring) < 0.01 * predict(ring, H100, BRIDGE).step_s
    assert exposed_s(gathered) == pytest.approx(predict(gathered, H100, BRIDGE).time_s["cp_comm"].total_s)
    backward = list(ops_of(gathered, backward=True))
    assert backward[0] == "cp_gather.again"
    assert ops_of(gathered, backward=True)["cp_gather.dgrad"].kind == "reduce_scatter"


def test_gathered_keys_are_held_with_their_gradients() -> None:
    ring, gathered = (memory_by_rank(DEEPSEEK, plan_of(kind).point, BRIDGE, H100) for kind in ("p2p", "all_gather"))
    more = gathered["buffers"][0] - ring["buffers"][0]
    keys = 65536 * 128 * (192 + 128) * 2
    assert keys < more <= 2 * keys
    assert gathered["activations"] == ring["activations"]


def test_splitting_heads_leaves_no_ring_and_a_shorter_one() -> None:
    heads, mixed = ops_of(plan_of("a2a")), ops_of(plan_of("a2a+p2p"))
    local = 65536 / 16 * 128 * 2
    assert heads["cp_split_heads"].comm_bytes == local * (192 + 192 + 128)
    assert heads["cp_join_heads"].comm_bytes == local * 128
    assert "cp_exchange" not in heads
    assert heads["attention_core"].rows == 65536
    assert heads["attention_core"].cols == 128 / 16
    assert mixed["cp_exchange"].num_messages == 3
    assert (mixed["cp_split_heads"].group.num_ranks, mixed["cp_exchange"].group.num_ranks) == (4, 4)
    # Neighbours split heads inside a node of 8; the ring passes between nodes.
    assert (mixed["cp_split_heads"].group.num_domains, mixed["cp_exchange"].group.num_domains) == (1, 2)


def test_heads_inside_a_node_and_a_ring_between_beat_heads_across_nodes() -> None:
    assert exposed_s(plan_of("a2a+p2p", cp_a2a_size=8)) < exposed_s(plan_of("a2a"))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"cp_comm": "a2a", "model": QWEN, "tp": 4, "cp": 4, "pp": 4}, "4 key-value heads"),
        ({"cp_comm": "a2a+p2p", "cp_a2a_size": 3}, "a divisor of cp 16"),
        ({"cp_comm": "a2a+p2p", "cp_a2a_size": 16}, "above 1 and below"),
        ({"cp_a2a_size": 4}, "cp_comm p2p"),
    ],
)
def test_illegal_kinds_name_the_rule(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        plan_of(**changes)


def test_a_stack_refuses_a_kind_it_does_not_run() -> None:
    found = dict(load_stack("torchtitan-2026.08").violations(DEEPSEEK, plan_of("a2a").point))
    assert "p2p, all_gather" in found["cp_comm"]


def test_ids_of_plans_without_the_new_fields_stay() -> None:
    assert plan_of().plan_id == plan_of(cp_comm="p2p", cp_a2a_size=1, packed_lengths=()).plan_id
    assert plan_of().plan_id != plan_of("a2a").plan_id


@given(st.sampled_from(KINDS), st.sampled_from([16384, 32768, 65536]))
def test_longer_sequences_never_take_less_time(kind: str, seq_len: int) -> None:
    shorter, longer = (predict(plan_of(kind, seq_len=length), H100, BRIDGE) for length in (seq_len, 2 * seq_len))
    assert longer.step_s > 1.5 * shorter.step_s


def test_packed_documents_cost_the_sum_of_their_squares() -> None:
    lengths = (32768, 16384, 8192, 4096, 4096)
    one, packed = ops_of(plan_of(cp=8)), ops_of(plan_of(cp=8, packed_lengths=lengths))

    def flops(ops: dict[str, Op]) -> float:
        return sum(op.flops for op in ops.values() if op.kind == "attention")

    assert flops(packed) / flops(one) == pytest.approx(sum(length**2 for length in lengths) / 65536**2)
    assert packed["cp_exchange"].comm_bytes == one["cp_exchange"].comm_bytes
    whole, parts = (plan_of(cp=8, packed_lengths=given) for given in ((), lengths))
    assert memory_by_rank(DEEPSEEK, whole.point, BRIDGE, H100) == memory_by_rank(DEEPSEEK, parts.point, BRIDGE, H100)
    before, after = predict(whole, H100, BRIDGE), predict(parts, H100, BRIDGE)
    assert after.time_s["attention"].total_s < 0.5 * before.time_s["attention"].total_s
    assert after.step_s < before.step_s


@pytest.mark.parametrize(
    "lengths, named", [((4096, 4096), "8192 tokens in all"), ((65536 - 17, 17), "not a multiple of 2 x cp 16")]
)
def test_packing_must_fill_the_sequence_and_split(lengths: tuple[int, ...], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        plan_of(packed_lengths=lengths)
