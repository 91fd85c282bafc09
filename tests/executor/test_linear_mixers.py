"""What linear mixers of both kinds have in common: the memory that their backward takes, and training in bf16."""

import pytest
import torch

from moeplan.executor.mesh import build_mesh
from moeplan.executor.model import Transformer
from moeplan.mixers import GatedDeltaNet, GqaAttention, LinearMixer, Mamba2
from moeplan.model_spec import LayerKind, ModelSpec
from moeplan.plan import Plan
from moeplan.simulator.buffers import buffer_bytes
from moeplan.simulator.stack import load_stack
from tests.executor.cases import run_steps, tiny_plan
from tests.executor.folding_cases import MODELS, RUN, STEPS, alone
from tests.executor.live_bytes import LiveBytes


@pytest.mark.parametrize(
    "mixer",
    [
        GatedDeltaNet(num_k_heads=2, num_v_heads=4, k_head_dim=128, v_head_dim=128),
        Mamba2(num_heads=8, head_dim=64, state_size=128),
    ],
    ids=lambda mixer: str(mixer.kind),
)
def test_backward_holds_what_the_native_stack_predicts(mixer: LinearMixer) -> None:
    model = ModelSpec(
        name="mixer", num_layers=1, hidden_size=256, vocab_size=64, dense_ffn_size=64,
        attention=GqaAttention(num_heads=4, num_kv_heads=4, head_dim=32), linear_mixer=mixer, attention_period=2,
    )  # fmt: skip
    plan = Plan(model=model, hardware="cpu", global_batch_size=1, seq_len=512, num_gpus=1, precision="bf16")
    block = Transformer(plan, build_mesh(plan.folding, 0), 1, torch.device("cpu")).layers[0].mixer
    assert block is not None
    x_LH = torch.randn(512, 256).bfloat16().requires_grad_()
    with LiveBytes() as live:
        y_LH = block(x_LH)
        kept_bytes = live.now_bytes
        live.forget_peak()
        y_LH.backward(torch.ones_like(y_LH))
    predicted = buffer_bytes(model, plan.point, load_stack("native"), (LayerKind("linear", "dense"),), 0.0)
    assert live.peak_bytes - kept_bytes == pytest.approx(predicted.working_set, rel=0.1)


@pytest.mark.parametrize("name", ["delta-net", "nemotron"])
def test_bf16_stays_near_float64(name: str) -> None:
    losses = run_steps(0, tiny_plan(MODELS[name], 1, precision="bf16", mbs=2), RUN, STEPS).losses
    # 8 bits of mantissa: 0.4 % of a loss of 5.5, and rounding may send a token to another expert.
    torch.testing.assert_close(losses, alone(name).losses, rtol=0, atol=0.03)
    assert losses[-1] < losses[0] - 0.05
