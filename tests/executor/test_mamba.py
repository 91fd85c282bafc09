"""Mamba-2 and layers of one block in a model: the formula, first values, and what a plan may not ask.

Their foldings are in test_foldings.py.
"""

import pytest
import torch
from torch.nn import functional as F

from moeplan.errors import InvalidInputError
from moeplan.executor.check import check_shared_depths, check_supported
from moeplan.executor.mamba import Mamba
from moeplan.executor.mesh import build_mesh
from moeplan.executor.model import Transformer
from moeplan.kernels.ssd_reference import SsdHeads, SsdTokens, ssd
from moeplan.layout import balanced_layout
from moeplan.mixers import Mamba2
from moeplan.run_config import RunConfig
from tests.executor.cases import tiny_plan
from tests.executor.folding_cases import MODELS, NEMOTRON


def test_a_mixer_is_its_formula_token_by_token() -> None:
    """Two documents of one sequence; convolution, time steps and gated norm written out."""
    plan = tiny_plan(NEMOTRON, 1, packed_lengths=(5, 11))
    block = Transformer(plan, build_mesh(plan.folding, 0), 7, torch.device("cpu")).layers[0].mixer
    assert isinstance(block, Mamba)
    x_SH = torch.randn(16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate, mixed, step = (x_SH @ block.in_weight.t()).split([32, 32 + 2 * 12, 8], 1)
    convolved = block.conv_bias.expand_as(mixed).clone()
    for token in range(16):
        for tap in range(4):
            if (seen := token - 3 + tap) >= (0 if token < 5 else 5):
                convolved[token] += block.conv_weight[:, tap] * mixed[seen]
    value, key, query = F.silu(convolved).split([32, 12, 12], 1)
    tokens = SsdTokens(
        value.reshape(1, 16, 8, 4),
        torch.log1p(torch.exp(step + block.time_bias))[None],
        key.reshape(1, 16, 2, 6),
        query.reshape(1, 16, 2, 6),
    )
    out = ssd(tokens, SsdHeads(-block.log_rate.exp(), block.skip), (5, 11))[0].reshape(16, 2, 16)
    gated = out * F.silu(gate).reshape(16, 2, 16)
    normed = gated * (gated.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = (normed.flatten(1) * block.norm_weight) @ block.out_weight.t()
    torch.testing.assert_close(block(x_SH), expected)


def test_rates_and_time_steps_begin_as_published_and_do_not_decay() -> None:
    plan = tiny_plan(NEMOTRON, 1)
    model = Transformer(plan, build_mesh(plan.folding, 0), 7, torch.device("cpu"))
    names = {entry.pieces[0].name.removeprefix("layers.0.mixer."): entry for entry in model.table.entries}
    values = {name: entry.parameter.detach() for name, entry in names.items()}
    rates, steps = values["log_rate"].exp(), F.softplus(values["time_step.bias"])
    assert 1 < float(rates.min()) < float(rates.max()) < 16
    assert 1e-3 < float(steps.min()) < float(steps.max()) < 0.1
    assert bool((values["skip"] == 1).all())
    for taps in ("value_conv.weight", "value_conv.bias"):
        assert 0.3 < float(values[taps].abs().max()) <= 0.5  # of four taps
    for name in ("log_rate", "time_step.bias", "skip", "norm.weight", "value_conv.bias"):
        assert not names[name].is_decayed, name
    assert names["gate.weight"].is_decayed


def test_depths_that_share_a_block_are_depths_of_equal_weights() -> None:
    shared = tiny_plan(MODELS["shared-depths"], 1)
    apart = tiny_plan(shared.model.model_copy(update={"mtp_shared": False}), 1)
    cpu, mesh = torch.device("cpu"), build_mesh(shared.folding, 0)
    one = Transformer(shared, mesh, 7, cpu)
    values = {entry.pieces[0].name: entry.parameter.detach() for entry in one.table.entries}
    two = Transformer(apart, mesh, 8, cpu)
    for entry in two.table.entries:
        name = entry.pieces[0].name.replace("layers.7.", "layers.6.")
        entry.parameter.data.copy_(values[name])
    ids = torch.randint(0, 256, (17,), generator=torch.Generator().manual_seed(0))
    losses = [model(ids[:-1], ids[1:]) for model in (one, two)]
    torch.testing.assert_close(*losses)
    grads = []
    for model, loss in zip((one, two), losses, strict=True):
        loss.backward()
        found = {entry.pieces[0].name: entry.parameter.grad for entry in model.table.entries}
        grads.append([found.get(f"layers.{layer}.projection.weight") for layer in (6, 7)])
    (once, nothing), (first, second) = grads
    assert nothing is None
    assert once is not None
    assert first is not None
    assert second is not None
    torch.testing.assert_close(once, first + second)


def test_what_shared_depths_do_not_run_with_is_named() -> None:
    model = MODELS["shared-depths"]
    assert "mm" in balanced_layout(model, 4).text
    check_supported(tiny_plan(model, 2, pp=2))
    with pytest.raises(InvalidInputError, match=r"layout: got .* MTP depths that share their weights in one stage"):
        check_supported(tiny_plan(model, 2, pp=2, layout="Ettttttm|mL"))
    check_shared_depths(tiny_plan(NEMOTRON, 1), RunConfig(force_balance=True))
    check_shared_depths(tiny_plan(model, 1), RunConfig(force_balance=True))
    with pytest.raises(InvalidInputError, match="record_routing: got there with mtp_shared"):
        check_shared_depths(tiny_plan(model, 1), RunConfig(record_routing="there"))
    with pytest.raises(InvalidInputError, match="force_balance: got True with mtp_shared"):
        check_shared_depths(tiny_plan(model, 1, recompute=("moe",)), RunConfig(force_balance=True))


@pytest.mark.parametrize(
    "mixer, changes, message",
    [
        ({}, {"tp": 4, "num_gpus": 4}, "tp 4 does not divide the 8 heads and 2 groups of linear_mixer"),
        ({"num_heads": 6}, {"cp": 4, "num_gpus": 4}, "cp 4 beside tp 1 cuts the 6 heads and 2 groups"),
        ({"num_groups": 8}, {"cp": 16, "num_gpus": 16, "seq_len": 32}, "cp 16 beside tp 1 cuts the 8 heads"),
    ],
)
def test_heads_that_do_not_divide_are_refused(mixer: dict[str, int], changes: dict[str, int], message: str) -> None:
    assert isinstance(NEMOTRON.linear_mixer, Mamba2)
    attention = NEMOTRON.attention.model_copy(update={"num_kv_heads": 4})
    other = {"linear_mixer": NEMOTRON.linear_mixer.model_copy(update=mixer), "attention": attention}
    with pytest.raises(ValueError, match=message):
        tiny_plan(NEMOTRON.model_copy(update=other), **changes)


def test_packs_of_more_ranks_than_heads_are_refused() -> None:
    documents = {"dynamic_cp": True, "document_lengths": (16,) * 8, "max_tokens_per_rank": 4}
    check_supported(tiny_plan(NEMOTRON, 8, **documents))
    with pytest.raises(ValueError, match="do not divide over tp 1 x packs of up to 16 ranks"):
        tiny_plan(NEMOTRON, 16, global_batch_size=16, **documents | {"document_lengths": (16,) * 16})
