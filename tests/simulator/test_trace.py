"""Traces: valid JSON whose spans lie inside their chunks."""

import itertools
import json

import pytest

from moeplan.hwprofiles.load import load_profile
from moeplan.plan import Plan
from moeplan.simulator.stack import load_stack
from moeplan.simulator.step_model import step_model
from moeplan.simulator.trace import step_timeline, trace_json

MODEL = load_stack("megatron-bridge-26.08")


def test_ops_fill_their_chunks_and_the_trace_is_json(report_plan: Plan) -> None:
    plan = report_plan.replace(global_batch_size=512)
    model = step_model(plan.model, MODEL, load_profile("gb200"))
    spans = step_timeline(model, plan.point)
    chunks = [span for span in spans.spans if span.stream == "chunks"]
    assert len(chunks) == 2 * plan.pp * plan.vp * plan.num_micro_batches
    first = min((span for span in chunks if span.rank == 0), key=lambda span: span.start_s)
    assert first.op == "forward stage 0 micro-batch 0"
    inside = [
        span
        for span in spans.spans
        if span.rank == 0 and span.stream == "compute" and first.start_s <= span.start_s < first.end_s
    ]
    assert inside[0].op == "embedding embedding"
    assert max(span.end_s for span in inside) == pytest.approx(first.end_s, rel=0.05)  # the host may end it
    for before, after in itertools.pairwise(inside):
        assert after.start_s >= before.end_s - 1e-12

    events = json.loads(trace_json(spans))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(spans.spans)
    assert {event["pid"] for event in complete} == {0, 1, 2, 3}
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(spans.end_s * 1e6)
