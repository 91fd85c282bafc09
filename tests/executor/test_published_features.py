"""What published models have beyond the plain ones, folded: sinks, biases, windows, scaled and partial rotary."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from moeplan.executor.attention import core_attention, window_mask
from moeplan.executor.expert_bias import add_expert_bias
from moeplan.executor.rope import model_rotary_tables
from moeplan.kernels.rotary import rotary_tables
from moeplan.mixers import GqaAttention, MlaAttention
from moeplan.model_spec import Llama3Scaling, ModelSpec, Moe, Router, YarnScaling
from moeplan.run_config import RunConfig
from tests.executor.cases import Outcome, run_steps, tiny_plan
from tests.executor.gloo_pool import GlooPool, gloo_pool
from tests.executor.test_folding_equality import assert_same
from tests.executor.test_saved_bytes import GQA, MLA, check, small_model, small_plan

STEPS = 3
RUN = RunConfig(steps=STEPS, lr=3e-3, lr_warmup_steps=2, clip_grad_norm=0.5)
YARN = YarnScaling(factor=4, original_max_positions=8, beta_fast=4, beta_slow=0.5, mscale=0.7, mscale_all_dim=1.3)
GPT = ModelSpec(
    name="folded-gpt",
    num_layers=2,
    hidden_size=32,
    vocab_size=256,
    attention=GqaAttention(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        sliding_window=6,
        sliding_period=2,
        rotary_dim=4,
    ),
    moe=Moe(
        num_experts=8,
        top_k=2,
        expert_ffn_size=16,
        mlp_bias=True,
        router=Router(num_groups=4, top_groups=2, group_score_experts=2, aux_loss_coeff=0.05),
    ),
    activation="clamped_swiglu",
    rope_scaling=YARN,
)
LATENT = GPT.model_copy(
    update={
        "name": "folded-latent",
        "attention": MlaAttention(
            num_heads=4, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
        ),
        "moe": Moe(num_experts=8, top_k=2, expert_ffn_size=16),
        "activation": "swiglu",
    }
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    with gloo_pool(4, tmp_path_factory.mktemp("gloo")) as pool:
        yield pool


@lru_cache
def alone(model: ModelSpec) -> Outcome:
    """The run on one process, without a process group."""
    return run_steps(0, tiny_plan(model, 1), RUN, STEPS)


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 2, "ep": 4},
        {"tp": 2, "etp": 2, "ep": 2, "recompute": ("core_attn", "moe_act")},
        {"pp": 2, "etp": 2, "memory_efficient_permutation": False},
        {"cp": 2, "ep": 2, "cp_comm": "p2p"},
        {"cp": 2, "ep": 2, "cp_comm": "all_gather"},
        {"cp": 2, "ep": 4, "cp_comm": "a2a"},
        {"cp": 4, "ep": 4, "cp_comm": "a2a+p2p", "cp_a2a_size": 2},
    ],
    ids=str,
)
def test_gpt_oss_folded_equals_alone(pool: GlooPool, changes: dict[str, Any]) -> None:
    assert_same(alone(GPT), pool.run(run_steps, tiny_plan(GPT, 4, **changes), RUN, STEPS))


def test_scaled_latent_attention_folded_equals_alone(pool: GlooPool) -> None:
    plan = tiny_plan(LATENT, 4, tp=2, ep=4, recompute=("mla_up_proj",))
    assert_same(alone(LATENT), pool.run(run_steps, plan, RUN, STEPS))


@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_takes_its_part_of_every_softmax(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q_BSND = torch.randn(2, 7, 4, 5, generator=generator, dtype=torch.float64)
    k_BSMD, v_BSMD = torch.randn(2, 2, 7, 2, 5, generator=generator, dtype=torch.float64)
    sinks_N = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    cpu = torch.device("cpu")
    mask_SS = window_mask(7, window, cpu) if window else None
    seen_SS = torch.ones(7, 7, dtype=torch.bool).tril() if mask_SS is None else mask_SS
    scores = torch.einsum("bqnd,bknd->bnqk", q_BSND, k_BSMD.repeat_interleave(2, 2)) / 5**0.5
    scores = scores.masked_fill(~seen_SS, -torch.inf)
    weights = torch.cat([scores, sinks_N[:, None, None].expand(2, 4, 7, 1)], 3).softmax(3)[..., :-1]
    expected = torch.einsum("bnqk,bknd->bqnd", weights, v_BSMD.repeat_interleave(2, 2))
    got = core_attention(q_BSND, k_BSMD, v_BSMD, mask_SS, sinks_N)
    torch.testing.assert_close(got, expected)
    direction = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    (got_grad,) = torch.autograd.grad((got * direction).sum(), sinks_N)
    (expected_grad,) = torch.autograd.grad((expected * direction).sum(), sinks_N)
    torch.testing.assert_close(got_grad, expected_grad)


def test_each_row_gets_the_bias_of_its_expert_times_its_probability() -> None:
    bias_EB = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    offsets_E, probs_R = torch.tensor([2, 2, 3], dtype=torch.int32), torch.tensor([1.0, 0.5, 0.25])
    rows: list[list[float]] = [[1, 2], [0.5, 1], [25, 50]]
    assert add_expert_bias(torch.zeros(3, 2), bias_EB, offsets_E, probs_R).tolist() == rows
    part = add_expert_bias(torch.zeros(3, 4), bias_EB, offsets_E, probs_R, first=1)
    assert part.tolist() == [[0, *row, 0] for row in rows]


def test_scaled_frequencies_keep_the_fast_and_slow_the_rest() -> None:
    positions, width = torch.tensor([1]), 8
    plain = rotary_tables(positions, width, 1e4, torch.float64)[1].asin()[0]
    scalings = (
        Llama3Scaling(factor=8, original_max_positions=1000),
        YARN.model_copy(update={"attention_factor": 1.0, "original_max_positions": 1000}),
    )
    for scaling in scalings:
        model = GPT.model_copy(update={"rope_scaling": scaling, "rope_theta": 1e4})
        scaled = model_rotary_tables(model, positions, width, torch.float64)[1].asin()[0]
        # Radians a position are 1, 1/10, 1/100 and 1/1000: 159 turns over the original length down to 0.16.
        assert scaled[0] == plain[0]
        assert float(scaled[-1]) == pytest.approx(float(plain[-1]) / scaling.factor)
        assert (scaled <= plain).all()


@pytest.mark.parametrize(
    "model",
    [
        small_model(activation="clamped_swiglu"),
        small_model(GQA.model_copy(update={"rotary_dim": 16})),
        small_model(GQA.model_copy(update={"sinks": True})),
        small_model(GQA.model_copy(update={"sinks": True, "sliding_window": 64})),
        small_model(moe={"mlp_bias": True, "shared_ffn_size": 0}),
        small_model(MLA, rope_scaling=YARN),
    ],
    ids=["clamped", "partial-rotary", "sinks", "windowed-sinks", "expert-biases", "scaled-latent"],
)
def test_saved_bytes_are_those_of_the_simulator(model: ModelSpec) -> None:
    check(small_plan(model))
