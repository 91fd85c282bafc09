"""Neighbours and ablations of a plan."""

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.planner.explain import ablations, neighbours
from moeplan.planner.request import SearchRequest, parse_pins
from moeplan.planner.search import search
from moeplan.presets import load_model
from moeplan.report.explain import why
from moeplan.simulator.stack import load_stack

GB300, BRIDGE = load_profile("gb300"), load_stack("megatron-bridge-26.08")


@pytest.fixture(scope="module")
def request_() -> SearchRequest:
    """DeepSeek-V3 on 256 GB300, folded as in the report."""
    pins = parse_pins("pp=4,vp=4,ep=64,tp=1,mbs=1,precision=mxfp8,dispatcher=flex", "--fix")
    return SearchRequest(load_model("deepseek-v3"), "gb300", GB300, BRIDGE, 256, 4096, 8192, pins, top_k=1)


def test_neighbours_are_one_step_away_and_say_why_they_cannot_be(request_: SearchRequest) -> None:
    best = search(request_).plans[0]
    found = {one.change: one for one in neighbours(best.plan, GB300, BRIDGE)}
    doubled = found["ep 64 -> 128"]
    assert doubled.predicted is None
    assert "512 does not divide" in doubled.problem
    half = found["pp 4 -> 2"].predicted
    assert half is not None
    assert half.memory_bytes["weights"][0] > best.predicted.memory_bytes["weights"][0]
    assert found["recompute mla_up_proj"].predicted is not None
    assert "dispatcher hybridep -> alltoall" in found
    assert "bubble" in why(best.predicted, half)


def test_leaving_a_technique_out_never_speeds_the_step_up(request_: SearchRequest) -> None:
    best = search(request_).plans[0]
    found = ablations(best.plan, GB300, BRIDGE)
    assert {one.change for one in found} >= {"without overlap", "without low precision", "without CUDA graphs"}
    for one in found:
        assert one.predicted is not None, one
        assert one.predicted.step_s >= best.predicted.step_s
