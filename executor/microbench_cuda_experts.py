"""Rates of the experts' matrix products on one GPU: readings ``grouped_gemm.PHASE.NUM_EXPERTS`` of ``calibrate``.

Each pass by the fastest of the back ends that a run chooses from (:mod:`moeplan.executor.kernel_tuning`), compared as
before a run, rows drawn as there. Weight gradients are added to fp32 main gradients, of one micro-batch and of two at
once, as a run does.

Shapes: E experts, R rows of all, H width in, F width out.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from moeplan.executor.candidate_timing import runnable, windows_under_load
from moeplan.executor.kernel_tuning import drawn_offsets, is_launch_bound, product_candidates
from moeplan.executor.microbench_cuda_window import CudaWindow
from moeplan.executor.microbench_window import Reading
from moeplan.hwprofiles.schema import GroupedGemmPhase
from moeplan.kernels.back_end_choice import Shape
from moeplan.kernels.grouped_gemm import PRODUCTS
from moeplan.kernels.grouped_weight_grad import TRITON, add_parts_, triton_takes
from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.weight_grad_pairs import Operands

# Experts, hidden, width: as the models that people train with one GPU's share of experts.
EXPERT_SHAPES = ((8, 4096, 14_336), (16, 7168, 2048), (64, 4096, 1536), (128, 2048, 768))
EXPERT_ROWS = (1024, 64, 256, 4096)
_Calls = Mapping[str, Callable[[], object]]  # by back end


def grouped_gemm(window: CudaWindow) -> list[Reading]:
    """Both expert products of a SwiGLU layer by pass and rows of an expert: FLOP/s in the fastest's windows."""
    return [reading for shape in EXPERT_SHAPES for reading in _of_shape(shape, window.short_s)]


def _of_shape(shape: Shape, warm_up_s: float) -> Iterator[Reading]:
    """After the first rows only each package's fastest: all tiles of all of them would take 20 s for each rows."""
    E, hidden, ffn = shape
    kept: dict[GroupedGemmPhase, list[str]] = {}
    for rows in EXPERT_ROWS:
        products = [_Product(E, rows, hidden, 2 * ffn), _Product(E, rows, ffn, hidden)]
        flops = sum(one.flops for one in products)
        for phase, calls in _passes(products).items():
            taking_part = {name: run for name, run in calls.items() if name in kept.get(phase, calls)}
            fastest = _by_speed(taking_part, len(products) * E, warm_up_s)
            kept.setdefault(phase, _fastest_of_each_package(fastest))
            amount = 2 * flops if phase == "wgrad_of_two" else flops
            rates = tuple(amount / time_s for time_s in next(iter(fastest.values())))
            yield Reading(f"grouped_gemm.{phase}.{E}", rows, rates)
        del products, calls, taking_part  # before the next are made


def _by_speed(calls: _Calls, num_products: int, warm_up_s: float) -> dict[str, list[float]]:
    """Seconds in each window of the back ends that a run may take, fastest first; what came before heated the GPU."""
    windows_s = windows_under_load(runnable(calls), warm_up_s=warm_up_s)
    times_s = {name: statistics.median(some) for name, some in windows_s.items()}
    if len(times_s) > 1 and is_launch_bound(times_s, num_products):
        times_s.pop("by_expert", None)
    return {name: windows_s[name] for name in sorted(times_s, key=lambda name: times_s[name])}


def _fastest_of_each_package(names: Iterable[str]) -> list[str]:
    """The first of each of ``quack_128x192``, ``quack_128x128``, ``triton`` and so on.

    Of two micro-batches at once, Triton's tiles are behind quack's at 1024 rows of 128 experts, and take half as long
    as those at 64.
    """
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.partition("_")[0], name)
    return list(first.values())


class _Product:
    """One weight's operands: R rows for each of E experts on average, twice, as two micro-batches have them."""

    def __init__(self, E: int, rows: int, width_in: int, width_out: int) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

        self.weight_EHF = normal(E, width_in, width_out)
        ends_E = drawn_offsets(E, E * rows, self.weight_EHF.device)
        self.micro_batches = [
            Operands(normal(E * rows, width_in), normal(E * rows, width_out), ends_E) for _ in range(2)
        ]
        self.main = MainGrad(torch.zeros(self.weight_EHF.shape, device="cuda"), is_clear=False)
        self.flops = 2 * E * rows * width_in * width_out

    def forward(self, backend: str) -> None:
        first = self.micro_batches[0]
        PRODUCTS[backend](first.x_TH, self.weight_EHF, first.offsets_E)

    def input_gradient(self, backend: str) -> None:
        first = self.micro_batches[0]
        PRODUCTS[backend](first.grad_TF, self.weight_EHF.transpose(1, 2), first.offsets_E)

    def add_weight_gradients(self, num_micro_batches: int, backend: str) -> None:
        add_parts_(self.main, self.micro_batches[:num_micro_batches], backend=backend)


def _passes(products: list[_Product]) -> dict[GroupedGemmPhase, _Calls]:
    """Calls of each pass over all products, by back end."""
    first = products[0]
    x_RH = first.micro_batches[0].x_TH
    names = product_candidates(x_RH, first.weight_EHF)
    adding = [*names, *(TRITON if triton_takes(first.main.total, x_RH) else ())]
    return {
        "fwd": _by_backend(names, [one.forward for one in products]),
        "dgrad": _by_backend(names, [one.input_gradient for one in products]),
        "wgrad": _by_backend(adding, [partial(one.add_weight_gradients, 1) for one in products]),
        "wgrad_of_two": _by_backend(adding, [partial(one.add_weight_gradients, 2) for one in products]),
    }


def _by_backend(names: Iterable[str], runs: list[Callable[[str], None]]) -> _Calls:
    def run_all(name: str) -> None:
        for run in runs:
            run(name)

    return {name: partial(run_all, name) for name in names}
