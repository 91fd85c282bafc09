"""Saved-tensor bytes of low precision equal the simulator's native stack.

One expert of 512 rows, a multiple of the tile: the executor pads the quantized rows of each expert to 128.
"""

import pytest

from moeplan.model_spec import ModelSpec
from moeplan.simulator.activations import kept_bytes
from tests.executor.saved_bytes import layer_kept_bytes
from tests.executor.test_saved_bytes import MLA, NATIVE, small_hybrid, small_model, small_plan

ONE_EXPERT = {"num_experts": 1, "top_k": 1, "shared_ffn_size": 256}
MODELS = {
    "gqa": small_model(moe=ONE_EXPERT),
    "mla": small_model(MLA, moe=ONE_EXPERT),
    "dense": small_model(dense=True),
    "mamba": small_hybrid("M", state_size=30, moe={"latent_size": 128}),
    "latent": small_hybrid("E", moe=ONE_EXPERT | {"latent_size": 128, "expert_ffn_size": 256}),
}


def _check(model: ModelSpec, precision: str, recompute: tuple[str, ...]) -> None:
    plan = small_plan(model, precision=precision, recompute=recompute)
    expected = kept_bytes(model, model.layer_kinds[0], plan.point, NATIVE)
    assert layer_kept_bytes(plan) == pytest.approx(expected.kept_bytes + expected.scales_bytes, rel=0.002)


@pytest.mark.parametrize("recompute", [(), ("layernorm",)])
@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_blockwise"])
@pytest.mark.parametrize("name", MODELS)
def test_linears_keep_their_quantized_inputs(name: str, precision: str, recompute: tuple[str, ...]) -> None:
    _check(MODELS[name], precision, recompute)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_that_stays_in_bf16_keeps_what_it_keeps_in_bf16(name: str) -> None:
    plan = small_plan(MODELS[name], precision="fp8_blockwise", bf16_first_layers=1)
    (kind,) = plan.model.kinds_with_bf16(1, 0)
    expected = kept_bytes(plan.model, kind, plan.point, NATIVE)
    assert expected.scales_bytes == 0
    assert layer_kept_bytes(plan) == pytest.approx(expected.kept_bytes, rel=0.002)


@pytest.mark.parametrize("recompute", [(), ("layernorm",)])
@pytest.mark.parametrize("name", MODELS)
def test_linears_that_stay_in_bf16_keep_their_inputs(name: str, recompute: tuple[str, ...]) -> None:
    parts = ("attention", "latent", "linear_out")
    plan = small_plan(MODELS[name], precision="fp8_blockwise", recompute=recompute, bf16_modules=parts)
    expected = kept_bytes(plan.model, plan.model.layer_kinds[0], plan.point, NATIVE)
    assert layer_kept_bytes(plan) == pytest.approx(expected.kept_bytes + expected.scales_bytes, rel=0.002)


@pytest.mark.parametrize("precision", ["fp8_current", "fp8_blockwise"])
@pytest.mark.parametrize("name", ["gqa", "mla", "latent"])
def test_an_activation_that_is_made_again_is_kept_in_no_form(name: str, precision: str) -> None:
    _check(MODELS[name], precision, ("moe_act",))
