from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moeplan.executor import attention_tuning, kernel_tuning
from moeplan.executor.attention import core_attention
from moeplan.executor.attention_tuning import attention_key, attention_shape
from moeplan.executor.mesh import build_mesh
from moeplan.kernels import flash_attention
from moeplan.kernels.back_end_choice import choices, choose, forget
from moeplan.plan import Plan
from tests.executor.cases import GQA_MODEL, MLA_MODEL, tiny_plan

PLAIN_MODEL = GQA_MODEL.model_copy(
    update={"attention": GQA_MODEL.attention.model_copy(update={"sliding_window": None})}
)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flash_attention, "installed_version", lambda: "4.0.0")
    forget()
    yield
    forget()


def _key(plan: Plan) -> str | None:
    return attention_key(plan, attention_shape(plan, build_mesh(plan.folding, 0)))


def test_heads_are_those_of_a_rank() -> None:
    attention = GQA_MODEL.attention
    plan = tiny_plan(PLAIN_MODEL, 2, tp=2)
    heads = attention_shape(plan, build_mesh(plan.folding, 0))
    assert heads[0] == attention.num_heads // 2
    assert heads[2:] == (attention.qk_head_dim, attention.v_head_dim)


def test_whole_sequences_are_compared() -> None:
    plan = tiny_plan(PLAIN_MODEL, 1, precision="bf16")
    key = _key(plan)
    assert key is not None
    assert f"{plan.mbs} x {plan.seq_len}" in key


def test_parts_of_sequences_unequal_widths_wide_numbers_and_graphs_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _key(tiny_plan(PLAIN_MODEL, 2, cp=2, precision="bf16")) is None
    assert _key(tiny_plan(MLA_MODEL, 1, precision="bf16")) is None
    assert _key(tiny_plan(PLAIN_MODEL, 1, precision="fp32")) is None
    plan = tiny_plan(PLAIN_MODEL, 1, precision="bf16")
    assert _key(plan.replace(packed_lengths=(plan.seq_len // 4, plan.seq_len - plan.seq_len // 4))) is None
    assert _key(plan.replace(cuda_graph=("full_iteration",))) is None
    monkeypatch.setattr(flash_attention, "installed_version", lambda: None)
    assert _key(plan) is None


@pytest.mark.parametrize(
    "changes, is_compared",
    [
        ({"sinks": True}, False),
        ({"sliding_window": 4}, False),
        ({"sliding_window": 4096}, True),
        ({"sliding_window": 4, "sliding_period": 2}, True),
    ],
)
def test_heads_that_only_masks_or_sinks_see_are_not(changes: dict[str, Any], is_compared: bool) -> None:
    attention = PLAIN_MODEL.attention.model_copy(update=changes)
    model = PLAIN_MODEL.model_copy(update={"attention": attention})
    assert (_key(tiny_plan(model, 1, precision="bf16")) is not None) == is_compared


def test_the_fastest_is_chosen_for_any_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv(kernel_tuning.FOLDER_VARIABLE, str(tmp_path))
    times_s = {"sdpa": 2.0, flash_attention.NAME: 1.0}
    monkeypatch.setattr(kernel_tuning, "measure_attention", lambda *_: times_s)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    plan = tiny_plan(PLAIN_MODEL, 1, precision="fp8_current")
    kernel_tuning.tune(plan, build_mesh(plan.folding, 0), torch.device("cuda", 0))
    assert list(choices().values()) == [flash_attention.NAME]


def test_the_chosen_one_runs_where_nothing_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "attend", lambda *heads: torch.zeros_like(heads[0]))
    q_BSND, k_BSMD = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 2, 8)
    assert core_attention(q_BSND, k_BSMD, k_BSMD, None).any()
    choose(flash_attention.OPERATION, (4, 2, 8, 8), flash_attention.NAME)
    assert not core_attention(q_BSND, k_BSMD, k_BSMD, None).any()
    assert core_attention(q_BSND, k_BSMD, k_BSMD, torch.ones(4, 4, dtype=torch.bool).tril()).any()
    assert core_attention(q_BSND, k_BSMD, k_BSMD, None, torch.zeros(4)).any()


def test_a_machine_without_the_package_has_one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tuning, "compare", lambda candidates: dict.fromkeys(candidates, 1.0))
    plan = tiny_plan(PLAIN_MODEL, 1)
    shape = attention_shape(plan, build_mesh(plan.folding, 0))
    assert attention_tuning.measure_attention(plan, shape, torch.device("cpu")) == {"sdpa": 1.0}
