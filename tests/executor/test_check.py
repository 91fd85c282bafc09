from typing import Any, get_args

import pytest

from moeplan.errors import InvalidInputError
from moeplan.executor import check
from moeplan.executor.check import check_places, check_run, check_supported, check_world
from moeplan.model_spec import ModelSpec
from moeplan.run_config import RunConfig
from moeplan.vocabulary import CpComm
from tests.executor.cases import DENSE_MODEL, GQA_MODEL, MLA_MODEL, tiny_plan
from tests.executor.folding_cases import DELTA_NET


@pytest.mark.parametrize("model", [GQA_MODEL, MLA_MODEL])
def test_what_the_executor_runs_passes(model: ModelSpec) -> None:
    check_supported(tiny_plan(model, 4, tp=2, etp=2, ep=2))
    if model.moe is not None and model.moe.shared_ffn_size:
        check_supported(tiny_plan(model, 4, ep=2, shared_expert_overlap=True))
    check_supported(tiny_plan(model, 4, ep=2, ep_overlap=True, delay_wgrad=True))
    check_supported(tiny_plan(model, 4, cp=2, cp_comm="a2a", packed_lengths=(4, 12)))


def test_every_kind_of_context_parallelism_passes() -> None:
    for kind in get_args(CpComm):
        size = 2 if kind == "a2a+p2p" else 1
        check_supported(tiny_plan(DENSE_MODEL, 4, cp=4, cp_comm=kind, cp_a2a_size=size))


@pytest.mark.parametrize(
    "key,changes",
    [
        ("flex_backend", {"dispatcher": "flex"}),
        ("dispatch_sms", {"dispatcher": "flex", "flex_backend": "torch", "dispatch_sms": 20}),
        ("moment_dtype", {"moment_dtype": "fp64", "precision": "bf16"}),
    ],
)
def test_each_limit_of_plans_is_named(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=f"^{key}: got .*, the native executor runs ") as caught:
        check_supported(tiny_plan(GQA_MODEL, 4, **changes))
    assert caught.value.hint


def test_each_limit_of_models_is_named() -> None:
    check_supported(tiny_plan(GQA_MODEL.model_copy(update={"vocab_size": 257}), 4, tp=2))
    moe = GQA_MODEL.moe
    assert moe is not None
    biased = GQA_MODEL.model_copy(update={"hidden_size": 36, "moe": moe.model_copy(update={"mlp_bias": True})})
    check_supported(tiny_plan(biased, 4, etp=4))
    with pytest.raises(InvalidInputError, match=r"^etp: got 8, .* where etp divides the 36 channels"):
        check_supported(tiny_plan(biased, 8, etp=8))


def test_kernels_of_a_library_take_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeplan.executor.check.find_spec", lambda name: name)
    check_supported(tiny_plan(GQA_MODEL, 4, ep=2, dispatcher="flex", precision="bf16", dispatch_sms=24))
    with pytest.raises(InvalidInputError, match="precision: got fp64, the native executor runs flex_backend hybridep"):
        check_supported(tiny_plan(GQA_MODEL, 4, ep=2, dispatcher="flex"))


def test_world_must_be_that_of_the_plan() -> None:
    check_world(tiny_plan(GQA_MODEL, 4), 4)
    for num_processes in (2, 8):
        with pytest.raises(InvalidInputError, match=f"got {num_processes} for a plan of 4 GPUs"):
            check_world(tiny_plan(GQA_MODEL, 4), num_processes)


def test_some_step_must_be_timed() -> None:
    check_run(RunConfig(steps=6, warmup_steps_untimed=3, profile_steps=2))
    with pytest.raises(InvalidInputError, match="steps: got 5, allowed: more than"):
        check_run(RunConfig(steps=5, warmup_steps_untimed=3, profile_steps=2))


@pytest.mark.parametrize(
    "key,changes",
    [
        ("flex_backend", {"dispatcher": "flex", "flex_backend": "hybridep"}),
        ("routing", {"routing": "drop"}),
        ("paged_stash_factor", {"paged_stash_factor": 1.5}),
    ],
)
def test_each_limit_of_dynamic_context_parallelism_is_named(
    monkeypatch: pytest.MonkeyPatch, key: str, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: name)
    dynamic = {"dynamic_cp": True, "precision": "bf16", "document_lengths": (8,) * 16, "ep": 2}
    check_supported(tiny_plan(GQA_MODEL, 4, **dynamic))
    with pytest.raises(InvalidInputError, match=f"^{key}: got .*dynamic_cp") as caught:
        check_supported(tiny_plan(GQA_MODEL, 4, **dynamic, **changes))
    assert caught.value.hint
    hybrid = DELTA_NET.model_copy(update={"num_mtp_layers": 0})
    check_supported(tiny_plan(hybrid, 4, **dynamic))
    with pytest.raises(ValueError, match="do not divide over tp 1 x packs of up to 8 ranks"):
        tiny_plan(hybrid, 8, **dynamic)
    with pytest.raises(InvalidInputError, match="record_routing: got places with dynamic_cp"):
        check_places(tiny_plan(GQA_MODEL, 4, **dynamic), RunConfig(record_routing="places"))
