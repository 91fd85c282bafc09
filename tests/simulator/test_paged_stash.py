"""Paged stash in predictions: room for the factor and no more, and copies both ways."""

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.model_spec import MOE_LAYER
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.activations import kept_bytes
from moeplan.simulator.backward_ops import backward_ops
from moeplan.simulator.layer_ops import forward_ops
from moeplan.simulator.layer_state import layer_bytes
from moeplan.simulator.op_shapes import OpShape, Part
from moeplan.simulator.stack import load_stack

H200, NATIVE = load_profile("h200"), load_stack("native")


def plan_of(**fields: object) -> Plan:
    settings = {"hardware": "h200", "num_gpus": 8, "seq_len": 4096, "global_batch_size": 64, "ep": 8, "mbs": 2}
    return Plan.model_validate({"model": load_model("qwen3-30b-a3b"), **settings, **fields})


def kept(**fields: object) -> float:
    plan = plan_of(**fields)
    return layer_bytes(plan.model, MOE_LAYER, plan.point, NATIVE)


def test_room_is_the_larger_of_factor_and_load() -> None:
    plan = plan_of()
    rows = kept_bytes(plan.model, MOE_LAYER, plan.point, NATIVE).expert_rows_bytes
    assert kept(paged_stash_factor=1.1) - kept() == pytest.approx(0.1 * rows)
    assert kept(paged_stash_factor=1.1, routing="natural") == kept(routing="natural")
    assert kept(paged_stash_factor=2, routing="natural") - kept() == pytest.approx(rows)
    assert kept(routing="natural") > kept(paged_stash_factor=1.1)


@pytest.mark.parametrize("factor", [0.5, 1.1])
@pytest.mark.parametrize("recompute, width", [((), 3 * 768), (("moe_act",), 2 * 768)])
def test_rows_are_copied_in_and_out(recompute: tuple[str, ...], width: int, factor: float) -> None:
    plan = plan_of(paged_stash_factor=factor, recompute=recompute)
    shape = OpShape.of(plan.point, NATIVE, H200)
    ops = forward_ops(plan.model, Part(MOE_LAYER), shape, NATIVE)
    stash = next(op for op in ops if op.name == "stash")
    assert stash.hbm_bytes == 2 * 8192 * 8 * (2048 + width) * 2
    back = next(op for op in backward_ops(ops, shape, NATIVE.time) if op.name == "stash.dgrad")
    assert back.hbm_bytes == stash.hbm_bytes


def test_what_it_does_not_go_with() -> None:
    for changes in ({"recompute": ("moe",)}, {"recompute": ("full",)}, {"offload_modules": ("expert_fc1",)}):
        with pytest.raises(ValueError, match="paged_stash_factor"):
            plan_of(paged_stash_factor=1.1, **changes)
