"""What summing FP8 products in two levels costs on Hopper: grouped GEMMs by tiling, and cuBLAS, at one level and two.

And what weight gradients of two micro-batches gain where they are added at once: twice the products of one.
``python -m benchmarks.fp8_sums --out fp8_sums.json`` from the root of the repository, some two minutes on one GPU.
Shapes are those of results/2026-11-29-h200-fp8.md and, last, of h200-fine. Operands are random; every row belongs to an
expert, as many to each.

Shapes: R rows, K summed width, N output width, E experts.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moeplan.executor.candidate_timing import Timer, under_load
from moeplan.kernels.grouped_gemm_fp8_triton import GRADIENT, ROWS, TWO_ACCUMULATORS, Tiling, gradient_gemm_, rows_gemm
from moeplan.kernels.padded_rows import padded_rows
from moeplan.kernels.quantized_gemm import QuantizedOperands

SHAPES = (
    (8, 32768, 4096, 28672),
    (8, 32768, 14336, 4096),
    (64, 131072, 4096, 3072),
    (64, 131072, 1536, 4096),
    (128, 131072, 2048, 1536),
    (128, 131072, 768, 2048),
)
PAIR = "weight gradients of a pair"
Runs = dict[str, Callable[[], object]]


class Way(NamedTuple):
    """Whether sums have two levels, and the tilings of rows and of weight gradients."""

    split: bool
    rows: Tiling
    gradient: Tiling


UNFLATTENED = replace(TWO_ACCUMULATORS, flatten=False)
# The first two are what is used; in the last two registers spill.
WAYS = {
    "one level": Way(split=False, rows=ROWS, gradient=GRADIENT),
    "two levels": Way(split=True, rows=TWO_ACCUMULATORS, gradient=TWO_ACCUMULATORS),
    "two levels, not flattened": Way(split=True, rows=UNFLATTENED, gradient=UNFLATTENED),
    "two levels, 256 wide": Way(split=True, rows=ROWS, gradient=GRADIENT),
    "two levels, four warps": Way(
        split=True, rows=replace(TWO_ACCUMULATORS, num_warps=4), gradient=replace(TWO_ACCUMULATORS, num_warps=4)
    ),
}


def _numbers(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def runs_of(shape: tuple[int, int, int, int], device: torch.device) -> Iterator[tuple[str, Runs]]:
    """Input gradients and weight gradients of a shape E, R, K, N; cuBLAS multiplies all rows by one weight.

    Operands of a pair are in memory of their own: the same again would come from L2.
    """
    num, num_rows, width, out = shape
    each = torch.full((num,), num_rows // num, dtype=torch.int32, device=device)
    rows = padded_rows(each.cumsum(0).int(), num_rows)
    one = torch.ones((), device=device)
    x_PK = _numbers(torch.float8_e5m2, device, rows.num_padded, width)
    weight_ENK = _numbers(torch.float8_e4m3fn, device, num, out, width)
    multiply = partial(rows_gemm, x_PK, one, weight_ENK, one.expand(num).contiguous(), rows)
    runs: Runs = {name: partial(multiply, split=way.split, tiling=way.rows) for name, way in WAYS.items()}
    if device.type == "cuda":
        dense = partial(torch._scaled_mm, x_PK, weight_ENK[0].t(), one, one, out_dtype=torch.bfloat16)
        runs |= {f"cuBLAS, {name}": partial(dense, use_fast_accum=name == "one level") for name in tuple(WAYS)[:2]}
    yield "rows", runs
    parts = [
        QuantizedOperands(
            (_numbers(torch.float8_e5m2, device, out, rows.num_padded), one, None),
            (_numbers(torch.float8_e4m3fn, device, width, rows.num_padded), one, None),
            rows,
        )
        for _ in range(2)
    ]
    total_ENK = torch.zeros((num, out, width), device=device)
    for operation, some in (("weight gradient", parts[:1]), (PAIR, parts)):
        add = partial(gradient_gemm_, total_ENK, some)
        yield operation, {name: partial(add, split=way.split, tiling=way.gradient) for name, way in WAYS.items()}


def measured(
    shape: tuple[int, int, int, int], device: torch.device, timed: Timer | None = None
) -> Iterator[dict[str, object]]:
    """A row for each way: TFLOP/s of 2 x rows x K x N, of a pair twice as many."""
    num, num_rows, width, out = shape
    for operation, runs in runs_of(shape, device):
        for name, time_s in under_load(runs, timed).items():
            rate = (2 if operation == PAIR else 1) * 2 * num_rows * width * out / time_s / 1e12
            yield {"shape": f"{num}, {num_rows}, {width} -> {out}", "operation": operation, "way": name, "tflops": rate}


def main() -> None:
    """Measure, print the table, and write it as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    found: list[dict[str, object]] = []
    print(torch.cuda.get_device_name(device), "torch", torch.__version__)
    print("| experts, rows, K -> N | operation | way | TFLOP/s |\n|---|---|---|---|")
    for shape in SHAPES:
        for row in measured(shape, device):
            found.append(row)
            print(f"| {row['shape']} | {row['operation']} | {row['way']} | {row['tflops']:.0f} |", flush=True)
        torch.cuda.empty_cache()
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
