"""Exchange buffers beside PyTorch's allocator."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moeplan.hwprofiles.load import load_profile
from moeplan.plan import Plan
from moeplan.presets import load_model
from moeplan.simulator.device_buffers import dispatcher_buffer_bytes

H100, GB300 = load_profile("h100"), load_profile("gb300")


def flex_plan(ep: int, backend: str, mbs: int = 1) -> Plan:
    return Plan(
        model=load_model("deepseek-v3"), hardware="gb300", num_gpus=ep, stack="megatron-bridge-26.08", seq_len=4096,
        global_batch_size=ep * mbs, mbs=mbs, ep=ep, dispatcher="flex", flex_backend=backend,
    )  # fmt: skip


def test_hybridep_has_room_for_all_tokens_in_and_out() -> None:
    """64 ranks of 4096 tokens: rows of 7168 BF16 and 256 fp32 probabilities, twice, in one NVLink domain."""
    plan = flex_plan(64, "hybridep")
    assert dispatcher_buffer_bytes(plan.model, plan.point, GB300) == 4096 * (7168 * 2 + 256 * 4) * 2 * 64


def test_hybridep_between_domains_keeps_three_rows_for_each_other_domain() -> None:
    plan = flex_plan(16, "hybridep")
    assert dispatcher_buffer_bytes(plan.model, plan.point, H100) == 4096 * (7168 * 2 + 128 * 4) * (2 * 16 + 3)


def test_deepep_rings_do_not_grow_with_tokens() -> None:
    small, large = flex_plan(16, "deepep"), flex_plan(16, "deepep", mbs=4)
    assert dispatcher_buffer_bytes(small.model, small.point, H100) == 10 * (8 * 256 + 2 * 2 * 128) * 7168 * 2
    assert dispatcher_buffer_bytes(large.model, large.point, H100) == dispatcher_buffer_bytes(
        small.model, small.point, H100
    )


@given(ep=st.sampled_from([2, 4, 8, 16, 32]), backend=st.sampled_from(["deepep", "hybridep"]))
def test_more_ranks_never_take_less(ep: int, backend: str) -> None:
    few, many = flex_plan(ep, backend), flex_plan(2 * ep, backend)
    assert dispatcher_buffer_bytes(few.model, few.point, H100) <= dispatcher_buffer_bytes(many.model, many.point, H100)


def test_none_for_the_all_to_all_and_for_one_rank() -> None:
    plan = flex_plan(8, "hybridep")
    assert dispatcher_buffer_bytes(plan.model, replace(plan.point, dispatcher="alltoall"), H100) == 0
    alone = flex_plan(1, "hybridep")
    assert dispatcher_buffer_bytes(alone.model, alone.point, H100) == 0
