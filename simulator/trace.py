"""A step as a trace that Perfetto and chrome://tracing open: chunks of every pipeline rank, expanded into ops."""

import json
from collections.abc import Iterator

from moeplan.point import Point
from moeplan.simulator.events import ChunkRun, simulate, timeline
from moeplan.simulator.op import Span, Timeline
from moeplan.simulator.step_model import StepModel
from moeplan.units import MICROSECOND

STREAMS = ("chunks", "compute", "dispatch", "tp", "cp")


def step_timeline(model: StepModel, point: Point) -> Timeline:
    """Chunks of one step on the stream ``chunks``, and the ops of the first micro-batch.

    An op is drawn where it stands in its chunk, scaled so that the ops fill it: overlap between a forward and a
    backward shortens both (see overlap.py).
    """
    time = model.step_times([point])[0]
    order = (point.pp, point.vp, point.num_micro_batches, point.micro_batch_group_size)
    runs = simulate(order, time.forward_s.tolist(), time.backward_s.tolist(), time.send_s)
    spans = [Span(span.rank, "chunks", span.op, span.start_s, span.end_s) for span in timeline(runs).spans]
    for run in runs:
        if run.micro_batch == 0:
            spans += _ops_of(model, point, run)
    return Timeline(tuple(sorted(spans, key=lambda span: (span.rank, span.start_s, span.end_s))))


def _ops_of(model: StepModel, point: Point, run: ChunkRun) -> Iterator[Span]:
    parts = [part for part, count in model.stage_parts(point)[run.stage].items() for _ in range(count)]
    phases = [(part.label, model.phase(point, part, run.kind)) for part in parts]
    if run.kind == "B":
        phases.reverse()
    planned_s = sum(phase.seconds for _, phase in phases)
    scale = (run.end_s - run.start_s) / planned_s if planned_s else 0.0
    start_s = run.start_s
    for kind, phase in phases:
        for op_run in phase.runs:
            begin, end = start_s + op_run.start_s * scale, start_s + op_run.end_s * scale
            yield Span(run.rank, op_run.op.stream, f"{kind} {op_run.op.name}", begin, end)
        start_s += phase.seconds * scale


def trace_json(spans: Timeline) -> str:
    """Chrome trace JSON: a process a pipeline rank, a thread a stream, microseconds."""
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for rank in sorted({span.rank for span in spans.spans})
    ]
    events += [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": STREAMS.index(stream), "args": {"name": stream}}
        for rank, stream in sorted({(span.rank, span.stream) for span in spans.spans})
    ]
    events += [
        {
            "name": span.op,
            "ph": "X",
            "pid": span.rank,
            "tid": STREAMS.index(span.stream),
            "ts": span.start_s / MICROSECOND,
            "dur": (span.end_s - span.start_s) / MICROSECOND,
        }
        for span in spans.spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
