"""Every preset, scaled down, is a model that the executor runs."""

import pytest
import torch

from moeplan.executor.check import check_supported
from moeplan.executor.mesh import build_mesh
from moeplan.executor.model import Transformer
from moeplan.mixers import GatedDeltaNet, GqaAttention, Mamba2
from moeplan.model_spec import ModelSpec
from moeplan.parameters import total_parameters
from moeplan.presets import load_model, model_names
from moeplan.weights import weight_shapes
from tests.executor.cases import tiny_plan


def scaled_down(model: ModelSpec) -> ModelSpec:
    """The same features in a few thousand parameters: two layers of each kind, heads of 8."""
    attention, moe = model.attention, model.moe
    small: dict[str, object] = {"num_heads": 4}
    if isinstance(attention, GqaAttention):
        shared = max(1, 4 * attention.num_kv_heads // attention.num_heads)
        small |= {"num_kv_heads": shared, "head_dim": 8, "sliding_window": attention.sliding_window and 5}
        small["rotary_dim"] = min(4, attention.rotary_dim)
    else:
        small |= {"q_lora_rank": min(12, attention.q_lora_rank), "kv_lora_rank": 8}
        small |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    dense = min(1, model.num_dense_layers)
    changes: dict[str, object] = {
        "layer_pattern": model.layer_pattern and "ME*E",
        "attention": attention.model_copy(update=small),
        "num_layers": 4 if model.layer_pattern else max(dense + 2 * model.moe_layer_period, model.attention_period),
        "num_dense_layers": dense,
        "hidden_size": 32,
        "vocab_size": 64,
        "dense_ffn_size": min(48, model.dense_ffn_size),
    }
    if isinstance(model.linear_mixer, GatedDeltaNet):
        sizes = {"num_k_heads": 2, "num_v_heads": 4, "k_head_dim": 8, "v_head_dim": 8}
        changes["linear_mixer"] = model.linear_mixer.model_copy(update=sizes)
    if moe is not None:
        sizes = {"num_experts": 16, "top_k": min(4, moe.top_k), "expert_ffn_size": 16}
        groups = {"num_groups": min(4, moe.router.num_groups), "top_groups": min(2, moe.router.top_groups)}
        sizes |= {"shared_ffn_size": min(24, moe.shared_ffn_size), "latent_size": min(8, moe.latent_size)}
        changes["moe"] = moe.model_copy(update={**sizes, "router": moe.router.model_copy(update=groups)})
    if isinstance(model.linear_mixer, Mamba2):
        small = {"num_heads": 8, "head_dim": 4, "state_size": 6, "num_groups": 2}
        changes["linear_mixer"] = model.linear_mixer.model_copy(update=small)
    return model.model_copy(update=changes)


@pytest.mark.parametrize("name", model_names())
def test_a_preset_runs(name: str) -> None:
    whole = load_model(name)
    check_supported(tiny_plan(whole, 1, precision="bf16"))
    plan = tiny_plan(scaled_down(whole), 1)
    made = Transformer(plan, build_mesh(plan.folding, 0), 7, torch.device("cpu"))
    num_parameters = sum(parameter.numel() for parameter in made.parameters())
    assert num_parameters == total_parameters(plan.model, with_mtp=True)
    ids = torch.randint(0, 64, (plan.seq_len + 1,), generator=torch.Generator().manual_seed(0))
    loss = made(ids[:-1], ids[1:]) / plan.seq_len
    loss.backward()
    assert 3 < float(loss.detach()) < 6  # a uniform guess is ln 64 = 4.2, and MTP adds a tenth
    assert all(parameter.grad is not None for parameter in made.parameters())


@pytest.mark.parametrize("name", model_names())
def test_the_weights_of_a_preset_are_counted_exactly(name: str) -> None:
    model = load_model(name)
    if model.moe is not None:  # experts are alike
        fewer = {"num_layers": min(model.num_layers, 8), "layer_pattern": model.layer_pattern[:8]}
        model = model.model_copy(update=fewer)
    counted = sum(torch.Size(shape).numel() for key, shape in weight_shapes(model).items() if "expert_bias" not in key)
    assert counted == total_parameters(model, with_mtp=True)
