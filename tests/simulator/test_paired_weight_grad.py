"""Weight gradients added for two micro-batches at once, in predictions: fewer bytes moved, more operands kept."""

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.model_spec import MOE_LAYER
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.backward_ops import backward_ops
from moeplan.simulator.layer_ops import forward_ops
from moeplan.simulator.memory import memory_items
from moeplan.simulator.op import Op
from moeplan.simulator.op_shapes import OpShape, Part
from moeplan.simulator.predict import predict
from moeplan.simulator.stack import SoftwareStack, load_stack

H200, NATIVE = load_profile("h200"), load_stack("native")
BOTH = ("expert_fc1", "expert_fc2")
WEIGHTS = 6 * 128 * 3 * 2048 * 768  # of the experts of h200-fine


def plan_of(**fields: object) -> Plan:
    settings = {"hardware": "h200", "num_gpus": 1, "seq_len": 4096, "global_batch_size": 32, "mbs": 4}
    return Plan.model_validate({"model": load_model("h200-fine"), **settings, **fields})


def weight_gradients(plan: Plan, stack: SoftwareStack = NATIVE) -> dict[str, Op]:
    shape = OpShape.of(plan.point, stack, H200)
    ops = backward_ops(forward_ops(plan.model, Part(MOE_LAYER), shape, stack), shape, stack.time)
    return {op.name: op for op in ops if op.phase == "wgrad"}


def added_bytes(plan: Plan) -> dict[str, float]:
    return {name: op.epilogue_hbm_bytes for name, op in weight_gradients(plan).items()}


def test_a_pair_is_added_once() -> None:
    plain, first, both = (added_bytes(plan_of(paired_wgrad=some)) for some in ((), BOTH[:1], BOTH))
    assert plain["expert_fc1.wgrad"] == 8 * 128 * 2048 * 1536
    assert first["expert_fc1.wgrad"] == both["expert_fc1.wgrad"] == plain["expert_fc1.wgrad"] / 2
    assert first["expert_fc2.wgrad"] == plain["expert_fc2.wgrad"] == 2 * both["expert_fc2.wgrad"]
    assert {name for name in plain if plain[name] != both[name]} == {"expert_fc1.wgrad", "expert_fc2.wgrad"}
    three = added_bytes(plan_of(paired_wgrad=BOTH, global_batch_size=12))
    assert three["expert_fc1.wgrad"] == pytest.approx(plain["expert_fc1.wgrad"] * 2 / 3)


@pytest.mark.parametrize("global_batch_size, paired_frac", [(32, 1.0), (12, 2 / 3)])
def test_an_odd_micro_batch_is_added_alone(global_batch_size: int, paired_frac: float) -> None:
    found = weight_gradients(plan_of(paired_wgrad=BOTH[:1], global_batch_size=global_batch_size))
    assert found["expert_fc1.wgrad"].paired_frac == pytest.approx(paired_frac)
    assert found["expert_fc2.wgrad"].paired_frac == 0


@pytest.mark.parametrize("grad_dtype, adds_fp32", [("fp32", True), ("bf16", False)])
def test_gradients_in_bf16_are_no_additions_to_fp32(grad_dtype: str, adds_fp32: bool) -> None:
    found = weight_gradients(plan_of(grad_dtype=grad_dtype))
    assert {op.adds_fp32 for op in found.values()} == {adds_fp32}


def test_a_stack_whose_gemms_only_write_adds_nothing_in_them() -> None:
    time = NATIVE.time.model_copy(update={"fused_grad_accumulation": False})
    found = weight_gradients(plan_of(), NATIVE.model_copy(update={"time": time}))
    assert not any(op.adds_fp32 for op in found.values())


def test_the_step_is_shorter_by_the_additions_saved() -> None:
    plain, paired = (predict(plan_of(paired_wgrad=some), H200, NATIVE) for some in ((), BOTH[1:]))
    rate = H200.hbm_bytes_per_s.value * H200.hbm_efficiency_frac.value
    # The native stack's GEMMs take 2 % longer than their roofline on top.
    assert plain.step_s - paired.step_s == pytest.approx(4 * 8 * WEIGHTS / 3 / rate, rel=0.03)


def test_copies_that_wait_as_tokens_are_made_again() -> None:
    plain, paired = (predict(plan_of(paired_wgrad=some), H200, NATIVE).time_s for some in ((), BOTH))
    # Four pairs in six layers: one row of each token is read and written, then each token read and its 8 rows written.
    moved = 4 * 6 * (2 + 1 + 8) * 16_384 * 2048 * 2 * NATIVE.time.permute_factor.value
    rate = H200.hbm_bytes_per_s.value * H200.gather_efficiency_frac.value
    assert paired["permute"].total_s - plain["permute"].total_s == pytest.approx(moved / rate)


def kept_bytes(**fields: object) -> float:
    """What activations grow by with pairs of both matrices."""
    plain, paired = (predict(plan_of(paired_wgrad=some, **fields), H200, NATIVE) for some in ((), BOTH))
    return paired.memory_bytes["activations"][0] - plain.memory_bytes["activations"][0]


def test_operands_of_one_micro_batch_are_kept() -> None:
    tokens, rows = 6 * 16_384, 6 * 16_384 * 8
    kept = (rows * (2 * 768 + 768 + 2048) + tokens * 2048) * 2
    assert kept_bytes() == kept == pytest.approx(7.25e9, rel=1e-3)
    items = memory_items(plan_of().model, plan_of(paired_wgrad=BOTH).point, NATIVE, 0)
    assert [item.size_bytes for item in items if item.name.startswith("operands of weight gradients")] == [kept]


@pytest.mark.parametrize("fields", [{"num_gpus": 2, "ep": 2, "global_batch_size": 64}, {"routing": "drop"}])
def test_rows_that_travel_or_are_dropped_wait_as_they_are(fields: dict[str, object]) -> None:
    assert kept_bytes(**fields) == 6 * 16_384 * 8 * (2048 + 2 * 768 + 768 + 2048) * 2


@pytest.mark.parametrize("precision, element_bytes", [("fp8_current", 1), ("fp8_blockwise", 1 + 4 / 128)])
def test_quantized_operands_wait_in_whole_tiles(precision: str, element_bytes: float) -> None:
    rows = (16_384 * 8 + 127 * 128) // 128 * 128
    kept = 6 * rows * (2048 + 2 * 768 + 768 + 2048) * element_bytes
    assert kept_bytes(precision=precision) == pytest.approx(kept, rel=1e-9)
    assert kept == pytest.approx(element_bytes * 5.66e9, rel=1e-3)
    in_half = kept_bytes(precision=precision, bf16_first_layers=3)  # tokens of those wait
    assert in_half == pytest.approx((kept + kept_bytes()) / 2, rel=1e-9)


def test_quantized_rows_are_added_once_and_not_copied_again() -> None:
    plain, paired = (predict(plan_of(precision="fp8_current", paired_wgrad=some), H200, NATIVE) for some in ((), BOTH))
    assert paired.time_s["permute"].total_s == plain.time_s["permute"].total_s
    rate = H200.hbm_bytes_per_s.value * H200.hbm_efficiency_frac.value
    assert plain.step_s - paired.step_s == pytest.approx(4 * 8 * WEIGHTS / rate, rel=0.03)


def test_another_engine_has_none() -> None:
    point = plan_of(paired_wgrad=BOTH).point
    assert "paired_wgrad" in dict(load_stack("megatron-bridge-26.08").violations(plan_of().model, point))
