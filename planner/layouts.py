"""Layouts that suit a model's head better than the rule: few or many layers beside it.

A head takes as long as 0.2 layers of a GPT of 530 billion parameters and as 4.2 of Qwen3-30B-A3B, counted in
multiply-adds; the report's rule, one MoE layer, is DeepSeek-V3's. The stage that holds the head sets the pace of a
pipeline, so plans that search returns are tried with heads of other weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moeplan.layout import balanced_layout
from moeplan.planner.request import SearchRequest
from moeplan.point import Point
from moeplan.simulator.memory import peak_memory_bytes
from moeplan.simulator.predict import step_times

HEAD_WEIGHTS = (0.25, 0.5, 1.5, 2.0, 3.0, 4.0, 6.0)  # in MoE layers
# Less is no reason to leave a layout that has been run: the median error of predictions is 4 %.
MIN_GAIN_FRAC = 0.04


def best_layouts(request: SearchRequest, points: Sequence[tuple[float, Point]]) -> list[tuple[float, Point]]:
    """The points, each given with its seconds a step, in the layouts that make them fastest; best first.

    A point keeps its layout where ``--fix`` names one, or where no other that fits saves MIN_GAIN_FRAC of the step.
    """
    found = [_improved(request, step_s, point) for step_s, point in points]
    return sorted(found, key=lambda one: (one[0], repr(one[1].as_dict())))


def _improved(request: SearchRequest, step_s: float, point: Point) -> tuple[float, Point]:
    others = list(_others(request, point))
    times = step_times(request.model, others, request.stack, request.profile) if others else []
    timed = [(time.step_s, index) for index, time in enumerate(times)]
    best_s, index = min(timed, default=(step_s, -1))
    return (best_s, others[index]) if best_s < (1 - MIN_GAIN_FRAC) * step_s else (step_s, point)


def _others(request: SearchRequest, point: Point) -> Iterator[Point]:
    if point.pp == 1 or "layout" in request.fixed:
        return
    tried = {point.layout}
    for weight in HEAD_WEIGHTS:
        layout = balanced_layout(request.model, point.pp * point.vp, weight).text
        other = replace(point, layout=layout)
        if layout not in tried and _fits(request, other):
            yield other
        tried.add(layout)


def _fits(request: SearchRequest, point: Point) -> bool:
    return peak_memory_bytes(request.model, point, request.stack, request.profile) <= request.usable_bytes
