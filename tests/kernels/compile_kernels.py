"""Compiles every Triton kernel for an H100 or H200; run as a program, without the interpreter. Needs no GPU."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moeplan.kernels import accumulate_triton, activation_triton, cross_entropy_triton, permute_triton, rotary_triton

FP32 = {"DTYPE": tl.float32, "BLOCK": 1024}
ACTIVATION = [FP32 | {"CODE": code, "GATED": code != 2, "HAS_PROBS": code != 1} for code in (0, 1, 2, 3)]
# Kernel, types of its other arguments, and the constants of each variant.
KERNELS = (
    (accumulate_triton._add, "*fp32 *bf16 i64", [{"BLOCK": 4096}]),
    (activation_triton._forward, "*bf16 *fp32 *bf16 i32", ACTIVATION),
    (activation_triton._backward, "*bf16 *bf16 *fp32 *bf16 *fp32 i32", ACTIVATION),
    (cross_entropy_triton._stats, "*bf16 *i64 *fp32 *fp32 *fp32 i32", [FP32]),
    (cross_entropy_triton._gradient, "*bf16 *fp32 *fp32 *i64 i32", [FP32]),
    (permute_triton._copy, "*bf16 *i32 *bf16 i32 i32", [{"BLOCK": 1024}]),
    (permute_triton._sum, "*bf16 *i32 *bf16 i32", [FP32 | {"K": 8}]),
    (
        rotary_triton._rotate,
        "*bf16 *bf16 *fp32 *fp32 i32 i32 i32 i32 i32 i32",
        [{"SIGN": sign, "DTYPE": tl.float32, "BLOCK_N": 16, "BLOCK_H": 64} for sign in (1, -1)],
    ),
)

for kernel, types, variants in KERNELS:
    for constants in variants:
        others = iter(types.split())
        signature = {name: "constexpr" if name in constants else next(others) for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        compiled = triton.compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))
        assert "ptx" in compiled.asm
