"""Compiles every Triton kernel for an H100 or H200, and those of FP8 GEMMs and of MXFP8 for a B200 as well.

Run as a program, without the interpreter. Needs no GPU.
"""

import re
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moeplan.kernels import (
    accumulate_triton,
    activation_fp8_sums_triton,
    activation_fp8_triton,
    activation_triton,
    adam_triton,
    causal_conv_triton,
    cross_entropy_triton,
    delta_scan_triton,
    embedding_triton,
    gated_norm_triton,
    grouped_gemm_fp8_triton,
    grouped_weight_grad_triton,
    norm_triton,
    padded_rows_triton,
    permute_triton,
    quantize_mxfp8_triton,
    quantize_triton,
    quantize_weights_triton,
    rotary_triton,
    router_triton,
    row_map_triton,
    split_qkv_triton,
)

WIDE = {"ld.global.v4.b32", "st.global.v4.b32"}
SHARED_BYTES = 227 * 1024  # what a program may take of its multiprocessor's, from an H100 to a B200
FP32 = {"DTYPE": tl.float32, "BLOCK": 1024}
ACTIVATION = [FP32 | {"CODE": code, "GATED": code != 2, "HAS_PROBS": code != 1} for code in (0, 1, 2, 3)]
ADAM = {"HAS_WEIGHT": True, "HAS_REMAINDER": False, "DTYPE": tl.float32, "WORD": 8, "BLOCK": 2048}
ROUTE_BACKWARD = {
    "K": 8, "SIGMOID": False, "NORMALIZE": True, "HAS_SHARE": True, "DTYPE": tl.float32, "BLOCK_T": 8, "BLOCK_E": 128,
}  # fmt: skip
ROUTE = {
    "K": 8, "GROUPS": 1, "TOP_GROUPS": 1, "PER_GROUP": 8, "SIGMOID": False, "NORMALIZE": True, "HAS_BIAS": False,
    "HAS_TOTALS": True, "DTYPE": tl.float32, "BLOCK_T": 8, "BLOCK_E": 128, "BLOCK_K": 8,
}  # fmt: skip
DEEPSEEK = {
    "GROUPS": 8,
    "TOP_GROUPS": 4,
    "PER_GROUP": 2,
    "SIGMOID": True,
    "HAS_BIAS": True,
    "HAS_TOTALS": False,
    "BLOCK_T": 4,
    "BLOCK_E": 256,
}
NORM = [
    {"HAS_UPDATE": rows == 1, "DTYPE": tl.float32, "ROWS": rows, "BLOCK": block}
    for rows, block in ((1, 4096), (16, 128))
]
NORM_BACKWARD = [
    {"HAS_SUM": rows == 1, "DTYPE": tl.float32, "ROWS": rows, "BLOCK": block, "num_warps": warps}
    for rows, block, warps in ((1, 8192, 16), (1, 2048, 4), (16, 128, 4))
]
QKV = {"DTYPE": tl.float32, "ROWS": 16, "BLOCK_H": 64}
CAUSAL_CONV = [
    {"K": 4, "HAS_BIAS": has_bias, "DTYPE": tl.float32, "BLOCK_T": 32, "BLOCK_C": 64} for has_bias in (False, True)
]
GATED_NORM = [
    {"GATE_FIRST": gate_first, "DTYPE": tl.float32, "ROWS": rows, "BLOCK": block}
    for gate_first, rows, block in ((False, 16, 128), (True, 4, 512))
]
EMBEDDING = {"ROWS": embedding_triton.ROWS, "DTYPE": tl.float32, "BLOCK": 1024}
DELTA_SCAN = [{"BLOCK_C": 64, "BLOCK_D": width, "BLOCK_E": 32, "num_stages": 2, "num_warps": 8} for width in (64, 128)]
WEIGHT_GRAD = [
    {
        "TILE_H": 128, "TILE_F": 256, "ROWS": 64, "HALVINGS": 2, "IS_FIRST": is_first, "REDUCE": reduce, "GROUP": 8,
        "IS_PAIR": is_pair, "num_stages": 4, "num_warps": 8,
    }
    for is_first, reduce, is_pair in ((1, 1, 1), (0, 1, 0), (0, 1, 1), (0, 0, 0))
]  # fmt: skip
FP8_TILE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "GROUP": 16, "num_stages": 3, "num_warps": 8}
FP8_ROWS = [FP8_TILE | {"BLOCKWISE": False, "SPLIT": False, "FLATTEN": flatten} for flatten in (True, False)]
FP8_GRADIENT = [
    FP8_TILE | {"BLOCKWISE": False, "SPLIT": False, "ADD": add, "REDUCE": add, "FLATTEN": False, "PREFETCH": add}
    for add in (False, True)
]
NEXT_INPUTS = ("next_a_desc", "next_b_desc", "next_end_ptr", "next_a_scale_ptr", "next_b_scale_ptr")
ALONE, PAIR = dict.fromkeys(NEXT_INPUTS) | {"IS_PAIR": False}, {"IS_PAIR": True}
HALF_TILE = {"BLOCK_N": 128, "num_stages": 4}
BLOCKS = HALF_TILE | {"BLOCKWISE": True}
SPLIT = HALF_TILE | {"SPLIT": True}
QUANTIZE = [
    {"BLOCKWISE": blockwise, "LARGEST": 448.0, "ROWS": 128, "COLS": 128, "COLUMNS_FIRST": False, "COMPILED": True}
    for blockwise in (False, True)
]
QUANTIZE_WEIGHTS = [
    {"BLOCKWISE": blockwise, "HAS_AMAX": has_amax, "LARGEST": 448.0, "SIDE": 128}
    for blockwise, has_amax in ((False, True), (True, False), (True, True))
]
WEIGHT_OUTPUTS = "*fp32 *fp8e4nv *fp8e4nv *fp32 *fp32 i32 i32"
MXFP8 = {"SIDE": 128, "num_warps": 8}
FP8_ACTIVATION = [
    one | {"CODE": code, "GATED": code == 0, "HAS_PROBS": True, "num_warps": 8} for one in QUANTIZE for code in (0, 2)
]
FP8_SUMS = [
    {"CODE": code, "GATED": code == 0, "HAS_PROBS": code == 0, "ROWS": rows, "COLS": cols}
    for code in (0, 2)
    for rows, cols in ((1, 2048), (8, 256))
]


def _gradient_kernels(element: str, width: int, variants: list[dict[str, Any]]) -> list[tuple[Any, str, Any]]:
    """Weight gradients of gradients in ``element``, of one micro-batch and of two, by tiles so wide."""
    part = f"tensordesc<fp8e4nv[128,128]> tensordesc<{element}[{width},128]> *i32 *fp32 *fp32"
    total = f"*fp32 tensordesc<fp32[1,128,{width // 4}]> i32 i32 i32"
    both = ((f"{part} {total}", ALONE), (f"{part} {part} {total}", PAIR))
    return [(grouped_gemm_fp8_triton._gradient, types, [one | own for one in variants]) for types, own in both]


# Kernel, types of its other arguments, and the constants of each variant.
KERNELS = (
    (accumulate_triton._add, "*fp32 *bf16 i64", [{"BLOCK": 4096}]),
    (activation_triton._forward, "*bf16 *fp32 *bf16 i32", ACTIVATION),
    (activation_triton._backward, "*bf16 *bf16 *fp32 *bf16 *fp32 i32", ACTIVATION),
    (activation_fp8_sums_triton._forward_amax, "*bf16 *fp32 *fp32 i32 i32", FP8_SUMS),
    (
        activation_fp8_triton._forward,
        "*bf16 *fp32 *fp32 *i32 *i32 *fp8e4nv *fp8e4nv *fp32 *fp32 i32 i32",
        FP8_ACTIVATION,
    ),
    (activation_fp8_sums_triton._backward_sums, "*bf16 *bf16 *fp32 *fp32 *fp32 i32 i32", FP8_SUMS),
    (
        activation_fp8_triton._backward,
        "*bf16 *bf16 *fp32 *fp32 *i32 *i32 *fp8e5 *fp8e5 *fp32 *fp32 i32 i32",
        FP8_ACTIVATION,
    ),
    (adam_triton._step, "*fp32 *fp32 *fp32 *fp32 *bf16 *i16 *fp64 i32 fp32 fp32 fp32 fp32 fp32 fp32", [ADAM]),
    (
        adam_triton._step,
        "*i16 *fp32 *bf16 *fp32 *i16 *i16 *fp64 i32 fp32 fp32 fp32 fp32 fp32 fp32",
        [ADAM | {"HAS_WEIGHT": False, "HAS_REMAINDER": True}],
    ),
    (cross_entropy_triton._stats, "*bf16 *i64 *fp32 *fp32 *fp32 i32", [FP32]),
    (cross_entropy_triton._gradient, "*bf16 *fp32 *fp32 *i64 i32", [FP32]),
    (causal_conv_triton._forward, "*bf16 *bf16 *bf16 *i64 *bf16 i32 i32 i32", CAUSAL_CONV),
    (causal_conv_triton._backward, "*bf16 *bf16 *bf16 *bf16 *i64 *bf16 *fp32 i32 i32 i32", CAUSAL_CONV),
    (delta_scan_triton._forward, "*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 i32 i32 i32 i32 i32", DELTA_SCAN),
    (
        delta_scan_triton._backward,
        "*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 i32 i32 i32 i32 i32",
        DELTA_SCAN,
    ),
    (embedding_triton._sum_chunks, "*fp32 *bf16 *i32 *i64 *fp32 *fp32 i32 i32", [EMBEDDING]),
    (embedding_triton._join_chunks, "*fp32 *i32 *fp32 *fp32 i32 i32", [EMBEDDING]),
    (
        grouped_gemm_fp8_triton._rows,
        "tensordesc<fp8e5[128,128]> tensordesc<fp8e4nv[256,128]> *bf16 *i32 *i32 *i32 *fp32 *fp32 i32 i32 i32",
        FP8_ROWS,
    ),
    (
        grouped_gemm_fp8_triton._rows,
        "tensordesc<fp8e4nv[128,128]> tensordesc<fp8e4nv[128,128]> *bf16 *i32 *i32 *i32 *fp32 *fp32 i32 i32 i32",
        [one | BLOCKS for one in FP8_ROWS],
    ),
    (
        grouped_gemm_fp8_triton._rows,
        "tensordesc<fp8e5[128,128]> tensordesc<fp8e4nv[128,128]> *bf16 *i32 *i32 *i32 *fp32 *fp32 i32 i32 i32",
        [FP8_ROWS[0] | SPLIT],
    ),
    *_gradient_kernels("fp8e5", 128, [FP8_GRADIENT[1] | SPLIT]),
    *_gradient_kernels("fp8e5", 256, FP8_GRADIENT),
    *_gradient_kernels("fp8e4nv", 128, [one | BLOCKS for one in FP8_GRADIENT]),
    (
        grouped_weight_grad_triton._add_products,
        (
            "tensordesc<bf16[64,128]> tensordesc<bf16[64,256]> *i32 tensordesc<bf16[64,128]> tensordesc<bf16[64,256]>"
            " *i32 tensordesc<fp32[1,128,64]> i32 i32 i32"
        ),
        WEIGHT_GRAD,
    ),
    (gated_norm_triton._forward, "*bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32 i32 i32 fp32", GATED_NORM),
    (
        gated_norm_triton._backward,
        "*bf16 *bf16 *bf16 *bf16 *bf16 *bf16 *fp32 i32 i32 i32 i32 i32 i32 fp32",
        GATED_NORM,
    ),
    (norm_triton._norm, "*bf16 *bf16 *bf16 *bf16 *bf16 *fp32 i32 i32 fp32", NORM),
    (norm_triton._norm_backward, "*bf16 *bf16 *bf16 *bf16 *fp32 *bf16 *fp32 i32 i32", NORM_BACKWARD),
    (padded_rows_triton._tiles, "*i32 *i32 *i32 *i32 *i32 i32 i32", [{"TILE": 128, "BLOCK_E": 128, "BLOCK_N": 32}]),
    (permute_triton._spread, "*bf16 *i32 *bf16 i32", [{"K": 8, "BLOCK": 2048}]),
    (permute_triton._copy, "*bf16 *i32 *bf16 i32 i32", [{"BLOCK": 1024}]),
    (permute_triton._sum, "*bf16 *i32 *bf16 i32", [FP32 | {"K": top_k} for top_k in (1, 8)]),
    (quantize_triton.amax_of_parts, "*bf16 *fp32 i32", [{"BLOCK": 16384}]),
    (
        quantize_triton._quantize_rows,
        "*bf16 *i32 *fp32 *i32 *i32 *fp8e4nv *fp8e4nv *fp32 *fp32 i32 i32",
        [one | {"TOP_K": top_k, "COLUMNS_FIRST": False, "COMPILED": True} for one in QUANTIZE for top_k in (0, 8)],
    ),
    *(
        (
            quantize_weights_triton._quantize_weights,
            f"{weight} *fp32 *fp8e4nv *fp8e4nv *fp32 *fp32 i32 i32",
            QUANTIZE_WEIGHTS,
        )
        for weight in ("*bf16", "*fp32")
    ),
    (quantize_weights_triton._tile_amax, "*fp32 *fp32 i32 i32", [{"SIDE": 128}]),
    (
        quantize_mxfp8_triton._quantize_rows,
        "*bf16 *i32 *i32 *i32 *i32 *fp8e4nv *fp8e4nv *u8 *u8 i32 i32",
        [MXFP8],
    ),
    (quantize_mxfp8_triton._quantize_weights, "*bf16 *fp8e4nv *fp8e4nv *u8 *u8 i32 i32", [MXFP8]),
    (
        rotary_triton._rotate,
        "*bf16 *bf16 *fp32 *fp32 i32 i32 i32 i32 i32 i32",
        [{"SIGN": sign, "DTYPE": tl.float32, "BLOCK_N": 16, "BLOCK_H": 64} for sign in (1, -1)],
    ),
    (router_triton._route, "*fp32 *fp32 *fp32 *i64 *fp32 i32 i32 fp32 fp32", [ROUTE, ROUTE | DEEPSEEK]),
    (
        router_triton._route_backward,
        "*fp32 *fp32 *fp32 *i64 *fp32 i32 i32 i32 i32 fp32 fp32",
        [ROUTE_BACKWARD, ROUTE_BACKWARD | {"SIGMOID": True}],
    ),
    (router_triton._count, "*i64 *fp32 i32 i32", [{"BLOCK": 1024, "BLOCK_E": 128}]),
    (row_map_triton._count, "*i64 *i32 i32 i32 i32", [{"BLOCK": 128, "BLOCK_E": 512}]),
    (
        split_qkv_triton._rotate_heads,
        "*bf16 *bf16 *bf16 *fp32 *fp32 i32 i32 i32 i32 fp32 i32",
        [QKV | {"HAS_NORM": has_norm} for has_norm in (True, False)],
    ),
    (
        split_qkv_triton._rotate_heads_backward,
        "*bf16 *bf16 *bf16 *bf16 *fp32 *fp32 *fp32 i32 i32 i32 i32 i32 i32 i32 fp32 i32",
        [QKV | {"HAS_NORM": has_norm} for has_norm in (True, False)],
    ),
    (split_qkv_triton._copy_heads, "*bf16 *bf16 i32 i32 i32 i32 i32 i32 i32 i32", [{"ROWS": 16, "BLOCK": 128}]),
    (row_map_triton._place, "*i64 *i32 *i32 *i32 i32 i32", [{"BLOCK": 128}]),
)
FOR_BLACKWELL = {
    grouped_gemm_fp8_triton._rows,
    grouped_gemm_fp8_triton._gradient,
    quantize_mxfp8_triton._quantize_rows,
    quantize_mxfp8_triton._quantize_weights,
}
# With one scale, found in the pass before, no number exceeds it, and converting keeps what is no number.
COVERED = {activation_fp8_triton._forward, activation_fp8_triton._backward}

for kernel, types, variants in KERNELS:
    for variant in variants:
        options = {key: value for key, value in variant.items() if key in {"num_stages", "num_warps"}}
        constants = {key: value for key, value in variant.items() if key not in options}
        others = iter(types.split())
        signature = {name: "constexpr" if name in constants else next(others) for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        pointers = [place for place, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
        aligned = {(place,): [["tt.divisibility", 16]] for place in pointers} if kernel is adam_triton._step else {}
        source = ASTSource(kernel, signature, places, aligned)
        targets = (90, 100) if kernel in FOR_BLACKWELL and not variant.get("SPLIT") else (90,)
        for capability in targets:
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            ptx = compiled.asm["ptx"]
            assert compiled.metadata.shared <= SHARED_BYTES, (kernel, variant)
            if aligned:  # 16 bytes at once, whatever the number of elements, but for both corrections
                assert set(re.findall(r"(?:ld|st)\.global\S*", ptx)) - {"ld.global.b64"} == WIDE, (kernel, variant)
            is_cut = "*fp8" in types and (kernel not in COVERED or variant["BLOCKWISE"])
            if is_cut:  # cutting to what FP8 holds must not make a number of what is none
                assert {"min.NaN.f32", "max.NaN.f32"} <= set(ptx.split()), (kernel, variant)
            if (
                variant.get("BLOCKWISE") is False and "GROUP" in variant
            ):  # how often sums leave the tensor cores for fp32
                is_hopper, num_parts = capability == 90, 1 + variant.get("IS_PAIR", False)
                accumulators = variant["BLOCK_M"] * variant["BLOCK_N"] // (32 * variant["num_warps"])  # of a thread
                additions = ptx.count("add.rn.f32") + ptx.count("add.f32")
                assert additions == num_parts * accumulators * variant["SPLIT"], (kernel, variant)
                num_products = num_parts * variant["BLOCK_K"] // 32
                assert (ptx.count("wgmma.mma_async") == num_products) == is_hopper, (kernel, variant)
