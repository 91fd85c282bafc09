"""What one GPU computes and moves while it is under load: the readings of ``moeplan calibrate`` on a CUDA device.

Names of readings as in ``microbench_compute``; here also ``host_link.DIRECTION`` and attention by
``PHASE.QK_DIM.V_DIM``. Data are random: a product of zeros draws less power and runs 13 % faster.

Shapes: M shorter output side, N longer, K inner, L length, D head width.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from moeplan.executor.attention import causal_attention
from moeplan.executor.attention_tuning import attention_candidates
from moeplan.executor.candidate_timing import runnable
from moeplan.executor.microbench_cuda_window import CudaWindow, graphed
from moeplan.executor.microbench_window import Reading
from moeplan.kernels.permute import permute, unpermute
from moeplan.kernels.row_map import row_map
from moeplan.units import GIB, MIB

TYPICAL_INNER = 4096  # K of all dense readings by rows
WIDTHS = (4096, 12_288)
LAUNCH_BOUND_ROWS = 512  # below it, a product ends before the host has issued the next: replay a graph
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
NUM_HEADS, NUM_TOKENS = 32, 16_384
BF16_BYTES = 2
CHAIN = 256  # small ops in a row
ADAM_BYTES = 28  # read weight, gradient and both moments in fp32, write all but the gradient


def _normal(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=requires_grad)


def gemm(window: CudaWindow) -> list[Reading]:
    """Dense products by the shorter output side and by inner dimension, each in the layouts of all three passes."""
    readings = []
    for M in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384):
        for width in WIDTHS:
            N = max(width, M)
            step: Callable[[], object] = _ThreeLayouts(M, N, TYPICAL_INNER)
            flops, window_s = 3 * 2 * M * N * TYPICAL_INNER, window.long_s
            if M <= LAUNCH_BOUND_ROWS:
                step, flops, window_s = graphed(step, 10), 10 * flops, window.short_s
            readings.append(Reading("gemm", M, window.rates(flops, step, window_s)))
    readings += [
        Reading("gemm_inner", K, window.seconds(_ThreeLayouts(4096, 4096, K), window.short_s))
        for K in (256, 512, 1024, 2048, 4096, 16_384)
    ]
    burst = _ThreeLayouts(8192, 8192, 8192)
    readings.append(Reading("peak.bf16", 8192, window.burst_rates(3 * 2 * 8192**3, burst)))
    return readings


class _ThreeLayouts:
    """An M x N output over inner K as forward, input gradient and weight gradient lay out their operands."""

    def __init__(self, M: int, N: int, K: int) -> None:
        self.x_MK, self.weight_NK = _normal(M, K), _normal(N, K)
        self.weight_KN, self.x_KM = _normal(K, N), _normal(K, M)

    def __call__(self) -> None:
        F.linear(self.x_MK, self.weight_NK)
        torch.mm(self.x_MK, self.weight_KN)
        torch.mm(self.x_KM.t(), self.weight_KN)


def attention(window: CudaWindow) -> list[Reading]:
    """Causal attention of NUM_TOKENS tokens by sequence length: forward's 2 products, backward's 5, causal halved.

    By the back end that takes less for both, as a run chooses. Head widths that no fused kernel takes leave no reading.
    """
    readings = []
    for qk_dim, v_dim in HEAD_DIMS:
        for L in (1024, 2048, 4096, 8192, 16_384):
            flops = [NUM_TOKENS * L * NUM_HEADS * width for width in (qk_dim + v_dim, 3 * qk_dim + 2 * v_dim)]
            by_backend = [
                [window.rates(work, run, window.short_s) for work, run in zip(flops, passes, strict=True)]
                for passes in ((step.forward, step.backward) for step in _attention_steps(L, qk_dim, v_dim))
            ]
            if not by_backend:
                continue
            fwd, bwd = min(
                by_backend,
                key=lambda rates: sum(work / statistics.median(rate) for work, rate in zip(flops, rates, strict=True)),
            )
            readings.append(Reading(f"attention.fwd.{qk_dim}.{v_dim}", L, fwd))
            readings.append(Reading(f"attention.bwd.{qk_dim}.{v_dim}", L, bwd))
    return readings


def _attention_steps(L: int, qk_dim: int, v_dim: int) -> list["_AttentionStep"]:
    """One by each back end that runs here, both ways."""
    names = attention_candidates(_normal(1, 1, 1, qk_dim), _normal(1, 1, 1, v_dim))
    make = {name: partial(_AttentionStep, L, qk_dim, v_dim, name) for name in names}
    try:
        return [make[name]() for name in runnable(make)]
    except RuntimeError:
        return []


class _AttentionStep:
    """Causal attention as the executor calls it."""

    def __init__(self, L: int, qk_dim: int, v_dim: int, backend: str) -> None:
        self.backend = backend
        batch = NUM_TOKENS // L
        self.qkv = [_normal(batch, L, NUM_HEADS, width, requires_grad=True) for width in (qk_dim, qk_dim, v_dim)]
        self.out = self.forward()
        self.grad = torch.randn_like(self.out)
        self.backward()  # a head width may fail in either pass

    def forward(self) -> Tensor:
        q, k, v = self.qkv
        return causal_attention(q, k, v, backend=self.backend)

    def backward(self) -> None:
        torch.autograd.grad(self.out, self.qkv, self.grad, retain_graph=True)


def memory(window: CudaWindow) -> list[Reading]:
    """Bytes read and written per second: a large copy, element-wise ops, Adam, rows by index."""
    source, target = torch.empty(2, GIB, dtype=torch.uint8, device="cuda").random_()
    readings = [Reading("memory.copy", GIB, window.rates(2 * GIB, partial(target.copy_, source), window.short_s))]
    del source, target
    a, b, out = _normal(3, 128 * MIB)
    size = a.nbytes
    readings += [
        Reading("memory.elementwise", size, window.rates(3 * size, partial(torch.add, a, b, out=out), window.short_s)),
        Reading("memory.elementwise", size, window.rates(3 * size, partial(torch.mul, a, b, out=out), window.short_s)),
        Reading("memory.elementwise", size, window.rates(2 * size, partial(F.silu, a), window.short_s)),
    ]
    del a, b, out
    return readings + _adam(window) + _gathers(window)


def _adam(window: CudaWindow) -> list[Reading]:
    main, grad, first, second = torch.randn(4, 256 * MIB, device="cuda").abs_()
    num_steps = torch.ones((), device="cuda")
    step = partial(
        torch.ops.aten._fused_adamw_, [main], [grad], [first], [second], [], [num_steps],
        lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return [Reading("memory.adam", main.nbytes, window.rates(ADAM_BYTES * main.numel(), step, window.short_s))]


def _gathers(window: CudaWindow) -> list[Reading]:
    """Permutation there and back, each token read (or written) once and each of its copies written (or read) once."""
    readings = []
    for T, K, E, H in ((NUM_TOKENS, 8, 128, 2048), (NUM_TOKENS, 2, 8, 4096)):
        rows = row_map(torch.rand(T, E, device="cuda").topk(K).indices, E)
        x_TH = _normal(T, H)
        rows_RH = permute(x_TH, rows)
        moved = (1 + K) * T * H * BF16_BYTES
        for name, call in (("permute", partial(permute, x_TH, rows)), ("unpermute", partial(unpermute, rows_RH, rows))):
            readings.append(Reading(f"memory.{name}", rows_RH.nbytes, window.rates(moved, call, window.short_s)))
    return readings


def launches(window: CudaWindow) -> list[Reading]:
    """Host seconds of one eager op with autograd, and device seconds of the shortest kernel (in a graph)."""
    x = torch.ones(16, device="cuda", requires_grad=True)
    weight = torch.ones(16, device="cuda")
    out = torch.ones(16, device="cuda")

    def train() -> None:
        y: Tensor = x
        for _ in range(CHAIN):
            y = y * weight
        torch.autograd.grad(y, x, weight)

    replay = graphed(lambda: torch.mul(weight, weight, out=out), CHAIN)
    launch_s = tuple(seconds / (2 * CHAIN) for seconds in window.seconds(train, window.short_s))
    floor_s = tuple(seconds / CHAIN for seconds in window.seconds(replay, window.short_s))
    return [Reading("launch", 1, launch_s), Reading("floor", 1, floor_s)]


def host_link(window: CudaWindow) -> list[Reading]:
    """Bytes per second between pinned host memory and the device, each way alone."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    ways = {
        "to_device": partial(device.copy_, host, non_blocking=True),
        "to_host": partial(host.copy_, device, non_blocking=True),
    }
    return [Reading(f"host_link.{way}", GIB, window.rates(GIB, call, window.short_s)) for way, call in ways.items()]
