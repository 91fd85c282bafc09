from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from moeplan.executor.measure import StepTrace
from moeplan.executor.scopes import STOP_LABEL, TASK_LABEL, scope
from moeplan.executor.trace import STEP_LABEL, family_times_of, union_length

CPU = torch.device("cpu")
Numbers = dict[str, tuple[float, float]]


def _event(name: str, start: float, end: float, **fields: Any) -> SimpleNamespace:
    """An event as the profiler gives it; microseconds."""
    defaults: dict[str, Any] = {
        "id": 0,
        "thread": 1,
        "fwd_thread": 0,
        "sequence_nr": -1,
        "cpu_parent": None,
        "is_async": False,
        "is_user_annotation": False,
        "device_type": SimpleNamespace(name="CPU"),
        "self_cpu_time_total": 0.0,
    }
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), **{**defaults, **fields})


def _kernel(start: float, end: float, launch_id: int, *, annotation: bool = False) -> SimpleNamespace:
    device = SimpleNamespace(name="CUDA")
    return _event("kernel", start, end, id=launch_id, device_type=device, is_user_annotation=annotation)


def _microseconds(events: list[SimpleNamespace], *, num_steps: int = 1, on_cuda: bool = False) -> Numbers:
    times = family_times_of(events, num_steps, on_cuda=on_cuda)
    return {family: (round(time.total_s * 1e6, 6), round(time.exposed_s * 1e6, 6)) for family, time in times.items()}


def test_the_nearest_scope_wins_over_outer_scopes_and_names() -> None:
    root = _event(STEP_LABEL, 0, 100, self_cpu_time_total=20)
    outer = _event("moeplan/router", 10, 90, cpu_parent=root, self_cpu_time_total=30)
    inner = _event("moeplan/tp_comm", 20, 50, cpu_parent=outer, self_cpu_time_total=25)
    reduce = _event("c10d::allreduce_", 20, 25, cpu_parent=inner, self_cpu_time_total=5)
    product = _event("aten::mm", 60, 80, cpu_parent=outer, self_cpu_time_total=20)
    times = _microseconds([root, outer, inner, reduce, product])
    assert times == {"router": (50, 50), "tp_comm": (30, 30), "host": (20, 20)}


def test_without_a_scope_the_name_says() -> None:
    root = _event(STEP_LABEL, 0, 60)
    names = ["aten::addmm", "aten::_grouped_mm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::add"]
    events = [
        _event(name, 10 * index, 10 * index + 10, cpu_parent=root, self_cpu_time_total=10)
        for index, name in enumerate(names)
    ]
    # A helper inside grouped_mm belongs to it, though the product inside is an mm by name.
    events.append(_event("aten::slice", 45, 50, cpu_parent=events[1], self_cpu_time_total=5))
    assert _microseconds([root, *events]) == {
        "dense_gemm": (10, 10),
        "expert_gemm": (15, 15),
        "attention": (10, 10),
        "elementwise": (10, 10),
        "host": (15, 15),
    }


def test_backward_goes_where_the_forward_that_made_its_node_went() -> None:
    root = _event(STEP_LABEL, 0, 100)
    # The number is only handed out when a node is made: the earlier op outside the scope has it too.
    early = _event("aten::detach", 0, 1, cpu_parent=root, sequence_nr=7)
    forward = _event("moeplan/router", 2, 10, cpu_parent=root)
    product = _event("aten::mm", 3, 9, cpu_parent=forward, sequence_nr=7)
    node = _event("autograd::engine::evaluate_function: MmBackward0", 50, 70, cpu_parent=root, sequence_nr=7)
    node.fwd_thread = 1
    grad = _event("aten::mm", 52, 68, cpu_parent=node, self_cpu_time_total=16)
    times = _microseconds([root, early, forward, product, node, grad], num_steps=2)
    assert times == {"router": (8, 8), "host": (42, 42)}


def test_a_collective_that_runs_longer_than_it_is_waited_for_shows_both() -> None:
    root = _event(STEP_LABEL, 0, 100)
    issue_scope = _event("moeplan/dp_comm", 10, 15, cpu_parent=root, self_cpu_time_total=1)
    issue = _event("c10d::allreduce_", 11, 15, cpu_parent=issue_scope, self_cpu_time_total=4)
    running = _event("gloo:all_reduce", 16, 76, thread=3, is_async=True)
    work = _event("aten::mm", 20, 70, cpu_parent=root, self_cpu_time_total=50)
    wait = _event("moeplan/dp_comm", 70, 77, cpu_parent=root, self_cpu_time_total=7)
    times = _microseconds([root, issue_scope, issue, running, work, wait])
    assert times == {"dp_comm": (60, 12), "dense_gemm": (50, 50), "host": (38, 38)}


def test_fibers_count_where_they_run_and_other_threads_do_not() -> None:
    root = _event(STEP_LABEL, 0, 100, self_cpu_time_total=100)
    task = _event(TASK_LABEL, 10, 90, thread=2, self_cpu_time_total=5)
    product = _event("aten::mm", 20, 40, thread=2, cpu_parent=task, self_cpu_time_total=20)
    crossing = _event("_Start", 40, 85, thread=2, cpu_parent=task, self_cpu_time_total=5)
    stop = _event(STOP_LABEL, 42, 82, thread=2, cpu_parent=crossing, self_cpu_time_total=40)
    elsewhere = _event("aten::mm", 45, 75, thread=3, self_cpu_time_total=30)
    times = _microseconds([root, task, product, crossing, stop, elsewhere])
    assert times == {"dense_gemm": (20, 20), "elementwise": (5, 5), "host": (75, 75)}


def test_kernels_belong_to_the_op_that_launched_them_and_hide_communication() -> None:
    root = _event(STEP_LABEL, 0, 100)
    gemm = _event("moeplan/expert_gemm", 1, 5, cpu_parent=root)
    launch = _event("cudaLaunchKernel", 2, 3, cpu_parent=gemm, id=41)
    comm = _event("moeplan/dispatch", 6, 9, cpu_parent=root)
    launch_comm = _event("cudaLaunchKernelExC", 7, 8, cpu_parent=comm, id=42)
    kernels = [_kernel(10, 50, 41), _kernel(40, 70, 42), _kernel(10, 70, 43, annotation=True)]
    times = _microseconds([root, gemm, launch, comm, launch_comm, *kernels], on_cuda=True)
    assert times == {"expert_gemm": (40, 40), "dispatch": (30, 20), "host": (40, 40)}


@pytest.mark.parametrize(
    "intervals,length",
    [([], 0.0), ([(0, 2), (1, 3)], 3.0), ([(0, 1), (5, 6)], 2.0), ([(0, 9), (1, 2), (8, 10)], 10.0)],
)
def test_union_length(intervals: list[tuple[float, float]], length: float) -> None:
    assert union_length(intervals) == length


def _train_step(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 256, generator=generator, requires_grad=True)
    x = torch.randn(num_rows, 256, generator=generator)
    with scope("router"):
        for _ in range(4):
            x = torch.softmax(F.linear(x, weight), -1)
    query = x.view(1, 4, num_rows, 64)
    x = F.scaled_dot_product_attention(query, query, query, is_causal=True).view(num_rows, 256)
    F.linear(x, weight.detach()).square().sum().backward()


def test_a_real_trace_sums_to_the_steps_and_follows_scopes_into_backward() -> None:
    _train_step(64)
    with StepTrace(CPU) as trace:
        _train_step(512)
        _train_step(512)
    times = trace.family_times(2)
    assert {"router", "attention", "dense_gemm", "elementwise", "host"} == times.keys()
    # Four products with both gradients in the router, one with one gradient outside.
    assert times["router"].exposed_s > times["dense_gemm"].exposed_s
    whole_us = next(event.time_range.elapsed_us() for event in trace._profile.events() if event.name == STEP_LABEL)
    assert sum(time.exposed_s for time in times.values()) == pytest.approx(whole_us * 1e-6 / 2)


@pytest.mark.gpu
def test_kernels_of_a_real_trace_follow_scopes_into_backward() -> None:
    device = torch.device("cuda")
    weight = torch.randn(4096, 4096, device=device, requires_grad=True)
    x = torch.randn(4096, 4096, device=device)
    with StepTrace(device) as trace:
        with scope("router"):
            y = x @ weight
        (y @ weight.detach()).square().sum().backward()
    times = trace.family_times(1)
    assert {"router", "dense_gemm", "elementwise", "host"} == times.keys()
    # Two products each: forward and the gradient of the weight; forward and the gradient of the input.
    assert times["router"].total_s == pytest.approx(times["dense_gemm"].total_s, rel=0.5)
