"""What comes once a step: bytes reduced and gathered, optimizer traffic, what hides."""

from typing import Any

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.collectives import collective_cost
from moeplan.simulator.data_parallel import COLLECTIVE_SM_FRAC, exposed_seconds, step_ends
from moeplan.simulator.offload import states_back_s
from moeplan.simulator.op import Placement
from moeplan.simulator.placement import rank_parameters
from moeplan.simulator.stack import load_stack

STACK = load_stack("megatron-bridge-26.08")
H100 = load_profile("h100")


def test_experts_without_replicas_send_nothing(report_plan: Plan) -> None:
    """EP64 on a stage of 64 ranks: EDP is 1, so only dense parameters travel (report section 13, fact 1)."""
    ends = step_ends(report_plan.model, report_plan.point, STACK.time, H100)
    parameters = rank_parameters(report_plan.model, report_plan.layout, 4, tp=1, etp=1, ep=64)[1]
    dense = sum(group.num_elements for group in parameters if not group.is_expert)
    group = Placement(64, 8)
    assert ends[1].reduce_s == collective_cost("reduce_scatter", 4 * dense, group, H100).seconds
    assert ends[1].gather_s == collective_cost("all_gather", 2 * dense, group, H100).seconds


def test_without_sharding_gradients_are_all_reduced_and_nothing_is_gathered() -> None:
    plan = Plan(model=load_model("llama3-8b"), hardware="h100", num_gpus=8, seq_len=4096, global_batch_size=64)
    sharded, whole = (
        step_ends(plan.model, plan.replace(sharding=sharding).point, STACK.time, H100)[0]
        for sharding in ("optimizer", "none")
    )
    assert whole.gather_s == 0
    assert whole.reduce_s > sharded.reduce_s
    assert whole.optimizer_s > 3 * sharded.optimizer_s


def test_hybrid_sharding_stays_inside_its_blocks() -> None:
    """Four blocks of eight GPUs, a node each: shards of 1/8 are all-reduced over the four nodes once a step."""
    plan = Plan(model=load_model("llama3-8b"), hardware="h100", num_gpus=32, seq_len=4096, global_batch_size=64)
    elements = sum(group.num_elements for group in rank_parameters(plan.model, plan.layout, 1, tp=1, etp=1, ep=1)[0])
    inside, across = Placement(8, 1), Placement(4, 4)
    for sharding, num_micro_batches in (("optimizer", 1), ("full", plan.num_micro_batches)):
        point = plan.replace(sharding=sharding, dp_replicate=4).point
        (ends,) = step_ends(plan.model, point, STACK.time, H100)
        scattered = collective_cost("reduce_scatter", 4 * elements, inside, H100).seconds
        repeated = collective_cost("all_reduce", 4 * elements / 8, across, H100).seconds
        gathered = collective_cost("all_gather", 2 * elements, inside, H100).seconds
        assert ends.reduce_s == pytest.approx(num_micro_batches * scattered + repeated, rel=1e-12)
        num_gathers = 2 * num_micro_batches if sharding == "full" else 1
        assert ends.gather_s == pytest.approx(num_gathers * gathered, rel=1e-12)


@pytest.mark.parametrize("changes, remainder_bytes", [({}, 0), ({"main_weight_remainders": True}, -2)])
def test_optimizer_moves_the_bytes_of_adam(changes: dict[str, Any], remainder_bytes: int) -> None:
    plan = Plan(model=load_model("llama3-8b"), hardware="h100", num_gpus=1, seq_len=4096, global_batch_size=1)
    plan = plan.replace(**changes)
    elements = sum(group.num_elements for group in rank_parameters(plan.model, plan.layout, 1, tp=1, etp=1, ep=1)[0])
    # Adam: gradient 4, main weight 4 + 4, moments 2 x (4 + 4), copy 2; the norm reads and zeroing writes gradients.
    # Remainders: 2 + 2 beside a weight that is read as well as written.
    moved = elements * (4 + 8 + 16 + 2 + 4 + 4 + remainder_bytes)
    reached = H100.hbm_bytes_per_s.value * STACK.time.optimizer_efficiency_frac.value
    assert step_ends(plan.model, plan.point, STACK.time, H100)[0].optimizer_s == pytest.approx(moved / reached)


@pytest.mark.parametrize("sharding, num_ranks", [("none", 1), ("optimizer", 8)])
def test_primary_weights_are_quantized_from_main_weights(sharding: Any, num_ranks: int) -> None:
    """Read twice at 4 bytes where they are updated, and no bf16 copy of 2 is written there or read on any rank."""
    plan = Plan(model=load_model("llama3-8b"), hardware="h100", num_gpus=8, seq_len=4096, global_batch_size=64)
    plan = plan.replace(precision="fp8_current", sharding=sharding)
    groups = rank_parameters(plan.model, plan.layout, 1, tp=1, etp=1, ep=1)[0]
    quantized = sum(group.num_elements for group in groups if group.is_quantized)
    reached = H100.hbm_bytes_per_s.value * STACK.time.optimizer_efficiency_frac.value
    copied, primary = (
        step_ends(plan.model, plan.replace(fp8_primary_weights=is_primary).point, STACK.time, H100)[0].optimizer_s
        for is_primary in (False, True)
    )
    assert primary - copied == pytest.approx(quantized * ((8 - 2) / num_ranks - 2) / reached)


def test_gradients_that_are_written_over_are_not_zeroed() -> None:
    plan = Plan(model=load_model("llama3-8b"), hardware="h100", num_gpus=1, seq_len=4096, global_batch_size=1)
    elements = sum(group.num_elements for group in rank_parameters(plan.model, plan.layout, 1, tp=1, etp=1, ep=1)[0])
    reached = H100.hbm_bytes_per_s.value * STACK.time.optimizer_efficiency_frac.value
    for sharding, saved in (("optimizer", 4 * elements), ("full", 0)):  # parts of full sharding are added to
        point = plan.replace(sharding=sharding).point
        zeroing, without = (
            step_ends(plan.model, point, STACK.time.model_copy(update={"zeroes_main_grads": zeroes}), H100)[0]
            for zeroes in (True, False)
        )
        assert zeroing.optimizer_s - without.optimizer_s == pytest.approx(saved / reached)


def test_states_on_the_host_come_back_for_the_step() -> None:
    plan = Plan(model=load_model("llama3-8b"), hardware="h100", num_gpus=1, seq_len=4096, global_batch_size=1)
    elements = sum(group.num_elements for group in rank_parameters(plan.model, plan.layout, 1, tp=1, etp=1, ep=1)[0])
    here, away = (
        step_ends(plan.model, one.point, STACK.time, H100)[0].optimizer_s
        for one in (plan, plan.replace(offload_optimizer_states=True))
    )
    # fp32 main weights and both moments; a transfer may have a latency, so one of all elements.
    assert away - here == pytest.approx(states_back_s(elements * (4 + 2 * 4), H100))


@pytest.mark.parametrize(
    "comm, window, chunks, overlap, exposed",
    [
        (10, 100, 4, False, 10),  # nothing hides
        (10, 100, 4, True, 2.5 + 7.5 * COLLECTIVE_SM_FRAC),  # all but the last bucket, for the SMs it takes
        (200, 100, 4, True, 125 + 75 * COLLECTIVE_SM_FRAC),  # more than the window
        (10, 100, 1, True, 10),  # one bucket: nothing left to hide behind
    ],
)
def test_what_lengthens_the_step(comm: float, window: float, chunks: int, overlap: bool, exposed: float) -> None:
    assert exposed_seconds(comm, window, chunks, overlap=overlap) == pytest.approx(exposed)
