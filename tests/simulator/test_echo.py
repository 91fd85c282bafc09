"""Clones of hot experts level the load, and cost their weights on the links and in memory."""

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.model_spec import DENSE_LAYER, MOE_LAYER
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.echo import clone_bytes, clone_elements, levelled_load
from moeplan.simulator.layer_ops import forward_ops
from moeplan.simulator.layer_state import layer_bytes, layer_parts
from moeplan.simulator.op_shapes import OpShape, Part
from moeplan.simulator.predict import predict
from moeplan.simulator.stack import load_stack

H200, NATIVE = load_profile("h200"), load_stack("native")
EXPERT = 3 * 2048 * 768


def plan_of(**fields: object) -> Plan:
    settings = {"hardware": "h200", "num_gpus": 8, "seq_len": 4096, "global_batch_size": 64, "ep": 8, "mbs": 2}
    return Plan.model_validate({"model": load_model("qwen3-30b-a3b"), **settings, "routing": "natural", **fields})


def test_weights_of_clones() -> None:
    plan = plan_of(echo_slots=2)
    assert clone_elements(plan.model, 2, 1) == 2 * EXPERT
    assert clone_bytes(plan.model, MOE_LAYER, plan.point) == 2 * EXPERT * 2
    assert clone_bytes(plan.model, DENSE_LAYER, plan.point) == 0
    ops = {op.name: op for op in forward_ops(plan.model, Part(MOE_LAYER), OpShape.of(plan.point, NATIVE, H200), NATIVE)}
    assert ops["clone_weights"].comm_bytes == 2 * EXPERT * 2
    assert ops["clone_weights"].group.num_ranks == 8


def test_parts_sum_to_the_layer() -> None:
    plan = plan_of(echo_slots=1)
    parts = sum(size for _, _, size in layer_parts(plan.model, MOE_LAYER, plan.point, NATIVE))
    assert parts == pytest.approx(layer_bytes(plan.model, MOE_LAYER, plan.point, NATIVE), rel=1e-12)


def test_a_level_load_costs_the_busiest_rank_less() -> None:
    natural, levelled = (predict(plan_of(echo_slots=slots), H200, NATIVE) for slots in (0, 1))
    balanced = predict(plan_of(routing="balanced"), H200, NATIVE)
    expert_s = [figures.time_s["expert_gemm"].total_s for figures in (natural, levelled, balanced)]
    assert expert_s[0] > 1.2 * expert_s[1]
    assert expert_s[1] == pytest.approx(expert_s[2], rel=1e-2)
    assert levelled.step_s > balanced.step_s, "clones travel"
    assert (levelled_load(1.3, 1), levelled_load(1.3, 0), levelled_load(0.9, 1)) == (1.0, 1.3, 0.9)


def test_other_stacks_have_no_clones() -> None:
    found = dict(
        load_stack("megatron-bridge-26.08").violations(load_model("qwen3-30b-a3b"), plan_of(echo_slots=1).point)
    )
    assert "echo_slots" in found
