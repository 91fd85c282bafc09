"""The nearest plan that fits: same ranks, less memory, and nothing needlessly slow."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeplan.hwprofiles.load import load_profile
from moeplan.hwprofiles.schema import HardwareProfile
from moeplan.plan import Plan
from moeplan.planner.nearest import nearest_fit
from moeplan.planner.request import MEMORY_MARGIN_FRAC
from moeplan.presets import load_model
from moeplan.simulator.predict import predict
from moeplan.simulator.stack import load_stack

H200, NATIVE = load_profile("h200"), load_stack("native")
DEGREES = ("tp", "cp", "pp", "vp", "etp", "ep", "num_gpus", "global_batch_size", "layout", "precision", "model")


def plan_of(model: str, **fields: object) -> Plan:
    settings = {"hardware": "h200", "num_gpus": 1, "seq_len": 4096, "global_batch_size": 32, "mbs": 8} | fields
    return Plan.model_validate({"model": load_model(model), **settings})


def with_memory(frac: float, plan: Plan) -> HardwareProfile:
    """A machine with room for that part of what the plan needs."""
    needed = predict(plan, H200, NATIVE).peak_memory_bytes
    memory = H200.memory_bytes.model_copy(update={"value": needed * frac / (1 - MEMORY_MARGIN_FRAC)})
    return H200.model_copy(update={"memory_bytes": memory})


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(frac=st.floats(0.8, 0.99))
def test_it_fits_and_keeps_the_ranks(frac: float) -> None:
    plan = plan_of("h200-coarse")
    machine = with_memory(frac, plan)
    found = nearest_fit(plan, machine, NATIVE)
    assert found is not None
    assert found.predicted.peak_memory_bytes <= machine.memory_bytes.value * (1 - MEMORY_MARGIN_FRAC)
    assert all(getattr(found.plan, key) == getattr(plan, key) for key in DEGREES)
    assert found.predicted == predict(found.plan, machine, NATIVE)
    assert found.changes


def test_less_room_is_never_faster() -> None:
    plan = plan_of("h200-fine")
    steps = [nearest_fit(plan, with_memory(frac, plan), NATIVE) for frac in (0.95, 0.9, 0.85)]
    times = [found.predicted.step_s for found in steps if found is not None]
    assert len(times) == 3
    assert times == sorted(times)


def test_what_a_run_needed_scales_predictions() -> None:
    plan = plan_of("h200-coarse")
    own = predict(plan, H200, NATIVE).peak_memory_bytes
    usable = H200.memory_bytes.value * (1 - MEMORY_MARGIN_FRAC)
    found = nearest_fit(plan, H200, NATIVE, used_bytes=1.4 * own)
    assert found is not None
    assert 1.4 * found.predicted.peak_memory_bytes <= usable < 1.4 * own


def test_nothing_fits() -> None:
    plan = plan_of("h200-coarse")
    assert nearest_fit(plan, with_memory(0.3, plan), NATIVE) is None


@pytest.mark.parametrize("recompute", [("full",), ("layernorm", "moe_act")])
def test_what_the_plan_recomputes_stays_recomputed(recompute: tuple[str, ...]) -> None:
    plan = plan_of("h200-fine", recompute=recompute)
    found = nearest_fit(plan, with_memory(0.97, plan), NATIVE)
    assert found is not None
    assert "full" in found.plan.recompute or set(recompute) <= set(found.plan.recompute)


def test_documents_stay_what_they_are() -> None:
    """Under dynamic_cp only recompute and offload are left: micro-batches hold what max_tokens_per_rank says."""
    lengths = (*(4096,) * 24, *(1024,) * 32)
    plan = plan_of("h200-fine", dynamic_cp=True, document_lengths=lengths, max_tokens_per_rank=8 * 4096)
    found = nearest_fit(plan, with_memory(0.9, plan), NATIVE)
    assert found is not None
    assert found.plan.document_lengths == lengths
    assert found.predicted.peak_memory_bytes < predict(plan, H200, NATIVE).peak_memory_bytes


def test_gradients_that_wait_are_given_up_for_room() -> None:
    plan = plan_of("h200-fine", mbs=4, paired_wgrad=("expert_fc1", "expert_fc2"))
    found = nearest_fit(plan, with_memory(0.93, plan), NATIVE)  # what waits is 7.2 of 91 GB
    assert found is not None
    assert found.plan == plan.replace(paired_wgrad=())
    assert found.changes == ("paired_wgrad expert_fc1+expert_fc2 -> none",)
