"""What one process computes and moves per second while all others do the same.

Names of readings: ``gemm`` (FLOP/s by the shorter output side), ``gemm_inner`` (seconds by inner dimension),
``peak.DTYPE``, ``grouped_gemm.NUM_EXPERTS`` (FLOP/s by rows of an expert), ``attention.PHASE.HEAD_DIM`` (FLOP/s by
length), ``memory.KIND`` (bytes/s), ``launch`` and ``floor`` (seconds).

Shapes: M shorter output side, N longer, K inner, E experts, R rows, H width in, F width out, L length, D head width.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.executor.microbench_window import Reading, Window
from moeplan.kernels.grouped_gemm import grouped_gemm as grouped
from moeplan.kernels.permute import permute, unpermute
from moeplan.kernels.row_map import row_map

# Sizes of models that a CPU trains in minutes; TYPICAL_INNER is the K of all readings by rows.
TYPICAL_INNER = 512
WIDTHS = (256, 512, 1024)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
FP32_BYTES = 4
NUM_HEADS = 8
WORKING_SET_BYTES = 64 * 2**20  # of a process: larger than its share of any cache
CHAIN = 64  # small ops in a row, so that reading the clock costs nothing


def gemm(window: Window) -> list[Reading]:
    """Dense products in fp32 by the shorter output side and by inner dimension; one large one for each peak."""
    rows = (1, 4, 16, 64, 256, 1024) if window.quick else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    readings = []
    for M in rows:
        for width in WIDTHS:
            N = max(width, M)
            values = window.rates(3 * 2 * M * N * TYPICAL_INNER, _ThreeLayouts(M, N, TYPICAL_INNER, torch.float32))
            readings.append(Reading("gemm", M, values))
    readings += [
        Reading("gemm_inner", K, window.seconds(_ThreeLayouts(256, 256, K, torch.float32)))
        for K in (32, 64, 128, 256, 512, 1024)
    ]
    for name, dtype in DTYPES.items():
        side = 1024 if name != "fp64" else 512
        values = window.rates(3 * 2 * side**3, _ThreeLayouts(side, side, side, dtype))
        readings.append(Reading(f"peak.{name}", side, values))
    return readings


class _ThreeLayouts:
    """An M x N output over inner K as forward, input gradient and weight gradient lay out their operands."""

    def __init__(self, M: int, N: int, K: int, dtype: torch.dtype) -> None:
        self.x_MK = torch.randn(M, K).to(dtype)
        self.weight_NK = torch.randn(N, K).to(dtype)
        self.weight_KN = self.weight_NK.t().contiguous()
        self.x_KM = self.x_MK.t().contiguous()

    def __call__(self) -> None:
        F.linear(self.x_MK, self.weight_NK)
        torch.mm(self.x_MK, self.weight_KN)
        torch.mm(self.x_KM.t(), self.weight_KN)


def grouped_gemm(window: Window) -> list[Reading]:
    """Grouped products in fp32 through the kernel that the executor runs: forward and both gradients together."""
    rows: tuple[int, ...] = (4, 16, 64, 256)
    widths, numbers_of_experts = [(256, 512), (256, 256)], [2, 8]
    if not window.quick:
        rows = (1, 2, *rows, 8, 32, 128, 512)
        widths += [(512, 1024), (1024, 512)]
        numbers_of_experts += [1, 4, 16]
    readings = []
    for E in numbers_of_experts:
        for M in rows:
            for widths_HF in widths:
                step = _GroupedStep(E, M, *widths_HF)
                readings.append(Reading(f"grouped_gemm.{E}", M, window.rates(step.flops, step)))
    return readings


class _GroupedStep:
    """Forward and backward of M rows for each of E experts."""

    def __init__(self, E: int, M: int, width_in: int, width_out: int) -> None:
        self.x_RH = torch.randn(E * M, width_in, requires_grad=True)
        self.weight_EHF = torch.randn(E, width_in, width_out, requires_grad=True)
        self.ends_E = torch.arange(M, E * M + 1, M, dtype=torch.int32)
        self.grad_RF = torch.randn(E * M, width_out)
        self.flops = 3 * 2 * E * M * width_in * width_out

    def __call__(self) -> None:
        y_RF = grouped(self.x_RH, self.weight_EHF, self.ends_E)
        torch.autograd.grad(y_RF, (self.x_RH, self.weight_EHF), self.grad_RF)


def attention(window: Window) -> list[Reading]:
    """Causal attention in fp32, 8 heads: forward, and backward of twice its FLOPs (causal halved)."""
    lengths = (64, 256, 1024) if window.quick else (64, 128, 256, 512, 1024, 2048)
    readings = []
    for D in (32, 64, 128):
        for L in lengths:
            step = _AttentionStep(L, D)
            readings.append(Reading(f"attention.fwd.{D}", L, window.rates(step.flops, step.forward)))
            readings.append(Reading(f"attention.bwd.{D}", L, window.rates(2 * step.flops, step.backward)))
    return readings


class _AttentionStep:
    """Causal attention of one sequence."""

    def __init__(self, L: int, D: int) -> None:
        self.qkv = [torch.randn(1, NUM_HEADS, L, D, requires_grad=True) for _ in range(3)]
        self.out = self.forward()
        self.grad = torch.randn_like(self.out)
        self.flops = 2 * NUM_HEADS * L * L * D  # 2 L L D each for QK and PV, halved

    def forward(self) -> Tensor:
        q, k, v = self.qkv
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward(self) -> None:
        torch.autograd.grad(self.out, self.qkv, self.grad, retain_graph=True)


def memory(window: Window) -> list[Reading]:
    """Bytes read and written per second: a large copy, element-wise ops into new tensors, Adam, rows by index."""
    readings = []
    source, target = torch.randn(2, 4 * 2**20)  # 16 MiB each
    num_bytes = source.numel() * FP32_BYTES
    readings.append(Reading("memory.copy", num_bytes, window.rates(2 * num_bytes, lambda: target.copy_(source))))
    for numel in (2**18, 2**20) if window.quick else (2**16, 2**18, 2**20, 2**22):
        size = numel * FP32_BYTES
        tensors = _Rotation(numel)
        readings += [
            Reading("memory.elementwise", size, window.rates(3 * size, partial(tensors.apply, torch.add))),
            Reading("memory.elementwise", size, window.rates(3 * size, partial(tensors.apply, torch.mul))),
            Reading("memory.elementwise", size, window.rates(2 * size, partial(tensors.apply, _silu_of_first))),
        ]
    adam = _Adam(2**20)
    readings.append(Reading("memory.adam", 2**20 * FP32_BYTES, window.rates(adam.num_bytes, adam)))
    return readings + _gathers(window)


def _gathers(window: Window) -> list[Reading]:
    """Permutation of 2048 tokens of width 256 to 2 of 8 experts, there and back."""
    T, K, H = 2048, 2, 256
    rows = row_map(torch.rand(T, 8).topk(K).indices, 8)
    x_TH = torch.randn(T, H)
    rows_RH = permute(x_TH, rows)
    size = T * K * H * FP32_BYTES
    there = window.rates(2 * size, lambda: permute(x_TH, rows))
    back = window.rates(size + size / K, lambda: unpermute(rows_RH, rows))
    return [Reading("memory.gather", size, there), Reading("memory.gather", size, back)]


class _Rotation:
    """Inputs and kept outputs beyond any cache, as in training: each op reads and writes what was not used lately."""

    def __init__(self, numel: int) -> None:
        count = max(4, WORKING_SET_BYTES // (2 * numel * FP32_BYTES))
        self.inputs = list(torch.randn(count, numel))
        self.outputs: list[Tensor | None] = [None] * count
        self.turn = 0

    def apply(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        """``op`` of the next two inputs; the result stays until its turn comes again."""
        self.turn = (self.turn + 1) % len(self.inputs)
        self.outputs[self.turn] = op(self.inputs[self.turn], self.inputs[self.turn - 1])


def _silu_of_first(first: Tensor, _: Tensor) -> Tensor:
    return F.silu(first)


class _Adam:
    """One Adam step in place, op by op, with fp32 moments."""

    def __init__(self, numel: int) -> None:
        self.param, self.grad, self.mean, self.square, self.work = torch.rand(5, numel)
        # lerp 2 read 1 written, mul 1+1, addcmul 2+1, sqrt 1+1, add 1+1, addcdiv 3+1
        self.num_bytes = 16 * numel * FP32_BYTES

    def __call__(self) -> None:
        self.mean.lerp_(self.grad, 0.1)
        self.square.mul_(0.99).addcmul_(self.grad, self.grad, value=0.01)
        torch.sqrt(self.square, out=self.work).add_(1e-8)
        self.param.addcdiv_(self.mean, self.work, value=-1e-3)


def launches(window: Window) -> list[Reading]:
    """Seconds of one op on 16 numbers: with autograd (forward and backward), and without."""
    x, weight, out = torch.ones(16, requires_grad=True), torch.ones(16), torch.ones(16)

    def train() -> None:
        y: Tensor = x
        for _ in range(CHAIN):
            y = y * weight
        torch.autograd.grad(y, x, weight)

    def bare() -> None:
        for _ in range(CHAIN):
            torch.mul(weight, weight, out=out)

    launch_s = tuple(seconds / (2 * CHAIN) for seconds in window.seconds(train))
    floor_s = tuple(seconds / CHAIN for seconds in window.seconds(bare))
    return [Reading("launch", 1, launch_s), Reading("floor", 1, floor_s)]
