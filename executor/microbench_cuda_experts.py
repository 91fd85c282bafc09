"""Rates of the experts' matrix products on one GPU: readings ``grouped_gemm.BACKEND.PHASE.NUM_EXPERTS``.

Of BACKENDS ``quack`` is what plans run that may take quack, ``torch`` what others do. Each pass by the fastest kernels
that a run chooses from (:mod:`moeplan.executor.expert_tuning`), compared as before a run, rows drawn as there; but the
same for both matrices, which a run chooses apart. Weight gradients are added to fp32 main gradients, of one micro-batch
and of two at once, as a run does.

Shapes: E experts.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from moeplan.executor.candidate_timing import Candidates, cuda_timed, runnable, windows_under_load
from moeplan.executor.expert_tuning import ExpertProduct, is_launch_bound, together
from moeplan.executor.microbench_cuda_window import CudaWindow
from moeplan.executor.microbench_window import Reading
from moeplan.hwprofiles.schema import GroupedGemmPhase
from moeplan.kernels.back_end_choice import Shape

# Experts, hidden, width: as the models that people train with one GPU's share of experts.
EXPERT_SHAPES = ((8, 4096, 14_336), (16, 7168, 2048), (64, 4096, 1536), (128, 2048, 768))
EXPERT_ROWS = (1024, 64, 256, 4096)
SLOW_HOST = "by_expert"
BACKENDS = TORCH, QUACK = "torch", "quack"


def grouped_gemm(window: CudaWindow) -> list[Reading]:
    """Both expert products of a SwiGLU layer by pass and rows of an expert: FLOP/s in the fastest's windows."""
    return [reading for shape in EXPERT_SHAPES for reading in _of_shape(shape, window.device, window.short_s)]


def _of_shape(shape: Shape, device: torch.device, warm_up_s: float) -> Iterator[Reading]:
    """After the first rows only each package's fastest: all tiles of all take 20 s for each number of rows."""
    E, hidden, ffn = shape
    kept: dict[GroupedGemmPhase, list[str]] = {}
    for rows in EXPERT_ROWS:
        weights = ((E, hidden, 2 * ffn), (E, ffn, hidden))
        products = [ExpertProduct(weight, E * rows, device, num_micro_batches=2) for weight in weights]
        flops = sum(2 * rows * math.prod(weight) for weight in weights)
        for phase, calls in _passes(products).items():
            num_micro_batches = 2 if phase == "wgrad_of_two" else 1
            taking_part = {
                name: run for name, run in calls.items() if name in kept.get(phase, calls) or name == SLOW_HOST
            }
            allowed = _with_time_for_host(taking_part, len(products) * E * num_micro_batches)
            fastest = _by_speed(allowed, warm_up_s)
            kept.setdefault(phase, _fastest_of_each_package(fastest))
            for backend, times_s in _by_plan(fastest).items():
                rates = tuple(num_micro_batches * flops / time_s for time_s in times_s)
                yield Reading(f"grouped_gemm.{backend}.{phase}.{E}", rows, rates)
        del products, calls, taking_part, allowed  # before the next are made


def _with_time_for_host(calls: Candidates, num_products: int) -> Candidates:
    """Those that a run may take: not one launch an expert where that leaves the host no time, which rows decide."""
    run = calls.get(SLOW_HOST)
    if run is None:
        return calls
    run()
    if not is_launch_bound(cuda_timed(run, 1), num_products):
        return calls
    return {name: call for name, call in calls.items() if name != SLOW_HOST}


def _by_speed(calls: Candidates, warm_up_s: float) -> dict[str, list[float]]:
    """Seconds in each window of those that run here, fastest first. What came before has heated the GPU."""
    windows_s = windows_under_load(runnable(calls), warm_up_s=warm_up_s)
    return dict(sorted(windows_s.items(), key=lambda item: statistics.median(item[1])))


def _by_plan(by_speed: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Windows of the fastest for plans that may take quack, where it is here, and of the fastest without it."""
    without = [name for name in by_speed if not name.startswith(QUACK)]
    found = {TORCH: by_speed[without[0]]} if without else {}
    if len(without) < len(by_speed):
        found[QUACK] = next(iter(by_speed.values()))
    return found


def _fastest_of_each_package(names: Iterable[str]) -> list[str]:
    """The first of each of ``quack_128x192``, ``quack_128x128``, ``triton`` and so on.

    Of two micro-batches at once, Triton's tiles are behind quack's at 1024 rows of 128 experts, and take half as long
    as those at 64.
    """
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.partition("_")[0], name)
    return list(first.values())


def _passes(products: Sequence[ExpertProduct]) -> dict[GroupedGemmPhase, Candidates]:
    """Calls of each pass over all products, by back end."""
    return {
        "fwd": together([one.forward() for one in products]),
        "dgrad": together([one.input_gradient() for one in products]),
        "wgrad": together([one.additions(1) for one in products]),
        "wgrad_of_two": together([one.additions(2) for one in products]),
    }
