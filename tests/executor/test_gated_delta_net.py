"""The gated delta net in a model: its formula, every folding of it, what it keeps, and what a plan may not ask."""

from typing import Any

import pytest
import torch

from moeplan.executor.gated_delta_net import GatedDeltaNetMixer
from moeplan.executor.mesh import build_mesh
from moeplan.executor.model import Transformer
from moeplan.kernels.delta_rule import BACKENDS
from moeplan.kernels.delta_rule_reference import DeltaTokens
from moeplan.mixers import GatedDeltaNet
from moeplan.model_spec import LayerKind
from moeplan.simulator.activations import activation_bytes
from moeplan.simulator.stack import load_stack
from tests.executor.cases import tiny_plan
from tests.executor.folding_cases import DELTA_NET, assert_equals_alone, quick_and_slow
from tests.executor.pools import Pools
from tests.executor.saved_bytes import layer_kept_bytes
from tests.executor.test_saved_bytes import GATED, small_model, small_plan

DOCUMENTS = {"packed_lengths": (4, 8, 4)}
QUICK: dict[str, tuple[int, str, dict[str, Any]]] = {
    "cp2, documents": (2, "delta-net", {"cp": 2, "mbs": 2, **DOCUMENTS}),
    "tp2, ep2": (2, "delta-net", {"tp": 2, "ep": 2}),
}
SLOW: dict[str, tuple[int, str, dict[str, Any]]] = {
    "pp2": (2, "delta-net", {"pp": 2, "layout": "Ett|ttmL"}),
    "cp2 alone": (2, "delta-net", {"cp": 2}),
    "full sharding, ep2": (2, "delta-net", {"sharding": "full", "ep": 2}),
    "tp2, documents": (2, "delta-net", {"tp": 2, **DOCUMENTS}),
    "ep2 beside other micro-batches": (2, "delta-net", {"ep": 2, "ep_overlap": True, "delay_wgrad": True}),
    "everything on the host": (2, "delta-net", {"ep": 2, "offload_layers": 3}),
    "tp2 cp2, etp2 ep2": (4, "delta-net", {"tp": 2, "cp": 2, "etp": 2, "ep": 2}),
    "cp4, heads of attention split in pairs": (
        4,
        "delta-net",
        {"cp": 4, "cp_comm": "a2a+p2p", "cp_a2a_size": 2, "ep": 4},
    ),
    "cp2 pp2 vp2, recomputed": (
        4,
        "delta-net",
        {
            "cp": 2,
            "pp": 2,
            "vp": 2,
            "ep": 2,
            "layout": "Et|ttt||mL",
            "recompute": ("layernorm", "core_attn", "moe_act"),
        },
    ),
    "full sharding, tp2 cp2, full recompute": (
        4,
        "delta-net",
        {"sharding": "full", "tp": 2, "cp": 2, "recompute": ("full",)},
    ),
}


@pytest.mark.parametrize("case", quick_and_slow(QUICK, SLOW))
def test_folded_equals_alone(pools: Pools, case: tuple[int, str, dict[str, Any]]) -> None:
    assert_equals_alone(pools, case)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp32"},
        {"recompute": ("layernorm",)},
        {"recompute": ("core_attn", "moe")},
        {"recompute": ("full",)},
        {"tp": 2, "num_gpus": 2},
        {"cp": 2, "num_gpus": 2},
        {"packed_lengths": (64, 128, 64)},
        {"precision": "fp8_current", "dense": True},
        {"dense": True},
    ],
    ids=str,
)
def test_what_a_layer_keeps_is_what_the_native_stack_predicts(changes: dict[str, Any]) -> None:
    dense = changes.get("dense", False)
    mixer = GatedDeltaNet(num_k_heads=4, num_v_heads=8, k_head_dim=32, v_head_dim=32)
    model = small_model(GATED, dense=dense).model_copy(update={"linear_mixer": mixer, "attention_period": 2})
    plan = small_plan(model, **{key: value for key, value in changes.items() if key != "dense"})
    kind = LayerKind("linear", "dense" if dense else "moe")
    expected = activation_bytes(plan.model, kind, plan.point, load_stack("native"))
    assert layer_kept_bytes(plan) == pytest.approx(expected, rel=0.01)


def test_a_mixer_is_its_formula_token_by_token() -> None:
    """Two documents of one sequence; convolution, decay and gate written out."""
    plan = tiny_plan(DELTA_NET, 1, packed_lengths=(5, 11))
    block = Transformer(plan, build_mesh(plan.folding, 0), 7, torch.device("cpu")).layers[0].mixer
    assert isinstance(block, GatedDeltaNetMixer)
    x_SH = torch.randn(16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v, gate, beta, time = (x_SH @ block.in_weight.t()).split([32, 32, 32, 32, 8, 8], 1)
    mixed = torch.cat([q, k, v], 1)
    convolved = torch.zeros_like(mixed)
    for token in range(16):
        first = 0 if token < 5 else 5
        for tap in range(4):
            if (seen := token - 3 + tap) >= first:
                convolved[token] += block.conv_weight[:, tap] * mixed[seen]
    mixed = convolved * torch.sigmoid(convolved)
    decay = -block.log_decay.exp() * torch.log1p(torch.exp(time + block.time_bias))
    heads = [part.reshape(1, 16, -1, width) for part, width in zip(mixed.split(32, 1), (8, 8, 4), strict=True)]
    tokens = DeltaTokens(heads[0], heads[1], heads[2], decay[None], torch.sigmoid(beta)[None])
    out = BACKENDS["reference"](tokens, (5, 11), 1)[0]
    normed = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * block.norm
    expected = (normed.flatten(1) * gate * torch.sigmoid(gate)) @ block.out_weight.t()
    torch.testing.assert_close(block(x_SH), expected)


def test_decays_and_biases_begin_as_published_and_do_not_decay() -> None:
    plan = tiny_plan(DELTA_NET, 1)
    model = Transformer(plan, build_mesh(plan.folding, 0), 7, torch.device("cpu"))
    found = {
        entry.pieces[0].name: entry for entry in model.table.entries if entry.pieces[0].name.startswith("layers.0")
    }
    rates = found["layers.0.mixer.log_decay"].parameter.detach().exp()
    assert 0.01 < float(rates.min()) < float(rates.max()) < 16
    assert bool((found["layers.0.mixer.time_step.bias"].parameter == 1).all())
    assert float(found["layers.0.mixer.query_conv.weight"].parameter.detach().abs().max()) <= 0.5  # of four taps
    undecayed = {"log_decay", "time_step.bias", "norm.weight"}
    for name, entry in found.items():
        if ".mixer." in name:
            assert entry.is_decayed == (name.split(".mixer.")[1] not in undecayed), name
