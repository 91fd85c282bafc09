"""From a profiler trace to seconds by op family.

An event belongs to the nearest enclosing ``moeplan/<family>`` scope. A backward event has none around it: it belongs
where the forward op of the same autograd sequence number did. What remains is told by the op's name.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from moeplan.executor.scopes import PREFIX, STOP_LABEL, TASK_LABEL
from moeplan.results import FamilyTime
from moeplan.vocabulary import OP_FAMILIES, OpFamily

STEP_LABEL = "moeplan_step"  # the root of a trace: what no op inside claims is host time
MICROSECOND_S = 1e-6  # the unit of profiler events

_FRAMES = frozenset((STEP_LABEL, TASK_LABEL, STOP_LABEL))  # time in which others run, or the host
_FAMILY_OF_LABEL: dict[str, OpFamily] = {f"{PREFIX}{family}": family for family in OP_FAMILIES}
# Checked in order; a name that holds none of these is elementwise.
_FAMILY_OF_NAME: tuple[tuple[str, OpFamily], ...] = (
    ("grouped_mm", "expert_gemm"),
    ("scaled_dot_product", "attention"),
    ("_flash_attention", "attention"),
    ("_efficient_attention", "attention"),
    ("c10d::", "dp_comm"),
    ("nccl:", "dp_comm"),
    ("aten::mm", "dense_gemm"),
    ("aten::addmm", "dense_gemm"),
    ("aten::bmm", "dense_gemm"),
    ("aten::baddbmm", "dense_gemm"),
)
_COMM_FAMILIES: frozenset[OpFamily] = frozenset({"dispatch", "tp_comm", "cp_comm", "dp_comm", "pp_comm"})

Interval = tuple[float, float]


def family_times_of(events: Iterable[Any], num_steps: int, *, on_cuda: bool) -> dict[OpFamily, FamilyTime]:
    """Seconds a step by family from the events (``torch.autograd.profiler_util.FunctionEvent``) of a trace.

    On a CPU an op's exposed time is its self time on the thread of the steps, or on those of fibers, of which one runs
    at a time while that thread waits; a collective of a communication family
    may run longer than it is waited for, which its total shows. On CUDA both are times of kernels, and communication
    is exposed where no other kernel runs. ``host`` is what remains of the steps.
    """
    ordered = sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))
    families = _families(event for event in ordered if not _is_device_event(event))
    root = next(event for event in ordered if event.name == STEP_LABEL and not _is_device_event(event))
    if on_cuda:
        total_us, exposed_us = _device_times(ordered, families)
    else:
        total_us, exposed_us = _cpu_times(ordered, families, root)
    host_us = max(0.0, (root.time_range.end - root.time_range.start) - sum(exposed_us.values()))
    total_us["host"], exposed_us["host"] = host_us, host_us
    scale = MICROSECOND_S / num_steps
    return {
        family: FamilyTime(total_s=total_us[family] * scale, exposed_s=exposed_us[family] * scale)
        for family in OP_FAMILIES
        if total_us[family] > 0
    }


def _is_device_event(event: Any) -> bool:
    return bool(event.device_type.name != "CPU")


def _named_family(name: str) -> OpFamily | None:
    return next((family for part, family in _FAMILY_OF_NAME if part in name), None)


def _families(ordered: Iterable[Any]) -> dict[int, OpFamily | None]:
    """Family of each host event by ``id(event)``; None: nothing says, so it is host time or elementwise.

    Events come by start time, so parents precede children and forward precedes backward. A number is handed to the
    op that starts last before its node is made, hence the latest event with a sequence number owns it.
    """
    families: dict[int, OpFamily | None] = {}
    is_scoped: dict[int, bool] = {}
    forward: dict[tuple[int, int], int] = {}
    for event in ordered:
        key, parent = id(event), id(event.cpu_parent)
        family, scoped = families.get(parent), is_scoped.get(parent, False)
        if event.name in _FAMILY_OF_LABEL:
            family, scoped = _FAMILY_OF_LABEL[event.name], True
        elif event.sequence_nr >= 0 and event.fwd_thread:
            owner = forward.get((event.fwd_thread, event.sequence_nr))
            if owner is not None and not scoped:
                family, scoped = families[owner], is_scoped[owner]
        elif event.sequence_nr >= 0:
            forward[event.thread, event.sequence_nr] = key
        if not scoped:
            family = _named_family(event.name) or family
        families[key], is_scoped[key] = family, scoped
    return families


def _cpu_times(
    ordered: Sequence[Any], families: dict[int, OpFamily | None], root: Any
) -> tuple[dict[OpFamily, float], dict[OpFamily, float]]:
    """Total and exposed microseconds by family of a trace without a device."""
    exposed_us: dict[OpFamily, float] = defaultdict(float)
    running_us: dict[OpFamily, float] = defaultdict(float)
    latest_collective: OpFamily = "dp_comm"
    threads = {root.thread, *(event.thread for event in ordered if event.name == TASK_LABEL)}
    for event in ordered:
        if event.name.startswith("c10d::"):
            latest_collective = families[id(event)] or "dp_comm"
        if event.is_async:
            # gloo's own threads report "gloo:..." from issue to end, outside any scope.
            if event.name.startswith("gloo:"):
                running_us[latest_collective] += event.time_range.end - event.time_range.start
        elif event.thread in threads and event.name not in _FRAMES and event.time_range.start >= root.time_range.start:
            exposed_us[families[id(event)] or "elementwise"] += event.self_cpu_time_total
    total_us = defaultdict(float, exposed_us)
    for family in _COMM_FAMILIES & running_us.keys():
        total_us[family] = max(exposed_us[family], running_us[family])
    return total_us, exposed_us


def _device_times(
    ordered: Sequence[Any], families: dict[int, OpFamily | None]
) -> tuple[dict[OpFamily, float], dict[OpFamily, float]]:
    """Total and exposed microseconds by family of the kernels and copies of a trace."""
    launcher = _launchers(ordered)
    intervals: dict[OpFamily, list[Interval]] = defaultdict(list)
    for event in ordered:
        if _is_device_event(event) and not event.is_user_annotation:
            family = families.get(launcher.get(event.id, 0)) or "elementwise"
            intervals[family].append((event.time_range.start, event.time_range.end))
    total_us = defaultdict(float, {family: sum(end - start for start, end in own) for family, own in intervals.items()})
    compute = [interval for family, own in intervals.items() if family not in _COMM_FAMILIES for interval in own]
    busy, exposed_us = union_length(compute), defaultdict[OpFamily, float](float)
    for family in OP_FAMILIES:
        if family in _COMM_FAMILIES:
            # Collectives in the order of OP_FAMILIES: what two hide from each other counts once.
            compute += intervals.get(family, [])
            exposed_us[family] = union_length(compute) - busy
            busy += exposed_us[family]
        else:
            exposed_us[family] = total_us[family]
    return total_us, exposed_us


def kernel_times_of(events: Iterable[Any], num_steps: int) -> dict[tuple[OpFamily, str], tuple[float, int]]:
    """Seconds and launches a step of each kernel, by family and name. A copy between host and device is one as well."""
    ordered = sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))
    families = _families(event for event in ordered if not _is_device_event(event))
    launcher = _launchers(ordered)
    times_us, counts = defaultdict[tuple[OpFamily, str], float](float), defaultdict[tuple[OpFamily, str], int](int)
    for event in ordered:
        if _is_device_event(event) and not event.is_user_annotation:
            key = (families.get(launcher.get(event.id, 0)) or "elementwise", str(event.name))
            times_us[key] += event.time_range.end - event.time_range.start
            counts[key] += 1
    scale = MICROSECOND_S / num_steps
    return {key: (times_us[key] * scale, round(counts[key] / num_steps)) for key in times_us}


def longest_kernels_of(events: Iterable[Any]) -> dict[OpFamily, str]:
    """The kernel that took most time in attention, dense and expert GEMMs: which back end ran."""
    ordered = sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))
    families = _families(event for event in ordered if not _is_device_event(event))
    launcher = _launchers(ordered)
    times_us: dict[OpFamily, dict[str, float]] = {"attention": {}, "dense_gemm": {}, "expert_gemm": {}}
    for event in ordered:
        if _is_device_event(event) and not event.is_user_annotation:
            of_family = times_us.get(families.get(launcher.get(event.id, 0)) or "elementwise")
            if of_family is not None:
                duration_us = event.time_range.end - event.time_range.start
                of_family[event.name] = of_family.get(event.name, 0.0) + duration_us
    return {family: max(own, key=lambda name: own[name]) for family, own in times_us.items() if own}


def _launchers(ordered: Iterable[Any]) -> dict[int, int]:
    """``id(event)`` of the driver call that started each kernel, by correlation id."""
    return {event.id: id(event) for event in ordered if not _is_device_event(event) and event.name.startswith("cu")}


def union_length(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals (start, end)."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
