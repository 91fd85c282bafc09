"""Layouts of the plans that search returns: faster than the rule's, or left as they are."""

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.layout import balanced_layout
from moeplan.planner.layouts import MIN_GAIN_FRAC
from moeplan.planner.request import SearchRequest, parse_pins
from moeplan.planner.search import search
from moeplan.presets import load_model
from moeplan.simulator.memory import peak_memory_bytes
from moeplan.simulator.predict import step_times
from moeplan.simulator.stack import load_stack

PIPELINE = "pp=8,vp=6"


def request(model: str, hardware: str, gpus: int, fix: str) -> SearchRequest:
    """Plans of a pipeline that ``fix`` pins."""
    return SearchRequest(
        model=load_model(model),
        hardware=hardware,
        profile=load_profile(hardware),
        stack=load_stack("megatron-bridge-26.08"),
        num_gpus=gpus,
        seq_len=4096,
        global_batch_size=2048,
        fixed=parse_pins(fix, "--fix"),
        top_k=3,
    )


def test_a_heavy_head_has_fewer_layers_beside_it() -> None:
    """Qwen3-235B: its head is 2.4 layers by multiply-adds, so the rule's last stage of a layer and the head waits."""
    asked = request("qwen3-235b-a22b", "h100", 256, PIPELINE)
    outcome = search(asked)
    rule = balanced_layout(asked.model, 48).text
    assert rule == "Et|(tt|)*46tL"
    steps = [ranked.predicted.step_s for ranked in outcome.plans]
    assert steps == sorted(steps)
    for ranked in outcome.plans:
        assert ranked.plan.layout == "Ett|(tt|)*46L"
        by_rule = ranked.plan.replace(layout=rule).point
        (time,) = step_times(asked.model, [by_rule], asked.stack, asked.profile)
        assert ranked.predicted.step_s < (1 - MIN_GAIN_FRAC) * time.step_s
        assert peak_memory_bytes(asked.model, ranked.plan.point, asked.stack, asked.profile) <= asked.usable_bytes


@pytest.mark.parametrize("layout", ["Et|(tt|)*46tL", "Ett|(tt|)*45t|tL"])
def test_a_layout_that_the_user_names_stays(layout: str) -> None:
    outcome = search(request("qwen3-235b-a22b", "h100", 256, f"{PIPELINE},layout={layout}"))
    assert {ranked.plan.layout for ranked in outcome.plans} == {layout}


def test_deepseek_keeps_the_layout_that_was_run_where_another_gains_little() -> None:
    outcome = search(request("deepseek-v3", "gb300", 256, "pp=4,vp=4,ep=64,tp=1,mbs=1"))
    assert {ranked.plan.layout for ranked in outcome.plans} == {"Et*4|(tttt|)*14tmL"}
