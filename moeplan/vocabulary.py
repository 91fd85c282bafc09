"""Names that simulator and executor share: precision recipes, recompute modules, families of time and memory."""

from dataclasses import dataclass
from typing import Literal, get_args

PrecisionName = Literal["fp64", "fp32", "bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4"]
RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "full"]
# allgather: every rank gets every token. flex: one copy for each rank and node instead of each expert (report section
# 2.2); its back end torch does so with the collectives of torch.distributed.
Dispatcher = Literal["alltoall", "allgather", "flex"]
FlexBackend = Literal["deepep", "hybridep", "torch"]
# Context parallelism (report section 6): keys and values pass in a ring, are gathered, or heads are split instead of
# the sequence; a2a+p2p splits heads in neighbouring ranks and passes a ring between those.
CpComm = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
Sharding = Literal["none", "optimizer", "full"]
CudaGraphScope = Literal["attn", "mamba", "mlp", "moe_router", "moe_preprocess", "moe", "full_iteration"]
# What recipes capture of MoE layers whose shapes depend on routing (report section 3.4).
PARTIAL_GRAPH: tuple[CudaGraphScope, ...] = ("attn", "moe_preprocess", "moe_router")
# Linears that a low-precision recipe may leave wide (:func:`wide_precision`).
Bf16Module = Literal["attention", "latent", "linear_out", "mtp"]
OffloadModule = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"
]
Routing = Literal["balanced", "natural", "drop"]

MemoryCategory = Literal["weights", "gradients", "optimizer", "activations", "logits", "buffers", "framework"]
MEMORY_CATEGORIES: tuple[MemoryCategory, ...] = get_args(MemoryCategory)
MEMORY_MEANING: dict[MemoryCategory, str] = {
    "weights": "parameters in their compute precision, with quantized copies",
    "gradients": "main gradients",
    "optimizer": "main weights and Adam moments",
    "activations": "tensors saved for backward, at the peak of the schedule",
    "logits": "logits and their gradient during the loss",
    "buffers": "transient tensors: exchange buffers, the largest working set of one layer",
    "framework": "device context and communicators; on a CPU, the Python process with torch loaded",
}

ExpertMatrix = Literal["expert_fc1", "expert_fc2"]

OpFamily = Literal[
    "attention",
    "dense_gemm",
    "expert_gemm",
    "router",
    "permute",
    "elementwise",
    "loss",
    "dispatch",
    "tp_comm",
    "cp_comm",
    "dp_comm",
    "pp_comm",
    "optimizer",
    "bubble",
    "host",
]
OP_FAMILIES: tuple[OpFamily, ...] = get_args(OpFamily)
FAMILY_MEANING: dict[OpFamily, str] = {
    "attention": "attention core (QK, softmax, PV), recurrences of linear mixers",
    "dense_gemm": "projections, dense and shared-expert MLPs",
    "expert_gemm": "grouped GEMMs of the routed experts",
    "router": "routing scores, top-k, auxiliary loss",
    "permute": "gathering tokens by expert and back, with quantize and pad",
    "elementwise": "norms, activations, short convolutions, rotary embedding, residuals, embedding lookup",
    "loss": "head GEMM and cross entropy",
    "dispatch": "expert-parallel exchange of tokens, both ways",
    "tp_comm": "tensor-parallel collectives",
    "cp_comm": "context-parallel collectives",
    "dp_comm": "gradient reduction and parameter gathering",
    "pp_comm": "sends between pipeline stages",
    "optimizer": "gradient norm and Adam",
    "bubble": "pipeline ranks waiting for each other",
    "host": "time the device waits for the host, and what no family claims",
}


@dataclass(frozen=True, slots=True)
class Precision:
    """Storage and arithmetic of one precision recipe (report section 5.1).

    ``param_bytes`` is the trained copy all compute reads or quantizes from; ``quantized_weight_bytes`` are further
    row- and column-wise copies per element; ``has_main_weights`` says whether fp32 main weights exist beside it.
    ``alignment`` is the row multiple an expert's tokens are padded to. ``scale_frac`` is the size of block scales
    over the quantized payload.
    """

    param_bytes: float
    quantized_weight_bytes: float
    has_main_weights: bool
    activation_bytes: float
    quantized_bytes: float | None
    scale_frac: float
    gemm_dtype: str
    alignment: int


# Per-tensor recipes scale whole tensors, so their scales weigh nothing; NVFP4 keeps half a byte row- and column-wise, a
# one-byte scale for every 16 elements, and pads to 128 rows.
# FP8 keeps a BF16 copy and two one-byte copies of the weights of quantized linears (8 + 8/d bytes a parameter with
# BF16 moments, report section 1.2). Scale overheads: 1x128 fp32 is 3.1 %, 1x32 E8M0 is 3.1 %.
PRECISIONS: dict[PrecisionName, Precision] = {
    "fp64": Precision(8, 0, False, 8, None, 0, "fp64", 1),
    "fp32": Precision(4, 0, False, 4, None, 0, "fp32", 1),
    "bf16": Precision(2, 0, True, 2, None, 0, "bf16", 1),
    "fp8_delayed": Precision(2, 2, True, 2, 1, 0, "fp8", 16),
    "fp8_current": Precision(2, 2, True, 2, 1, 0, "fp8", 16),
    "fp8_blockwise": Precision(2, 2, True, 2, 1, 4 / 128, "fp8_block", 16),
    "mxfp8": Precision(2, 2, True, 2, 1, 1 / 32, "mxfp8", 32),
    "nvfp4": Precision(2, 1, True, 2, 0.5, 1 / 8, "nvfp4", 128),
}


def wide_precision(module: Bf16Module, precision: PrecisionName) -> PrecisionName:
    """What linears have that a plan leaves wide under ``precision``: bf16, outputs of linear mixers MXFP8 under NVFP4.

    Nemotron 3 Super (arXiv 2604.12374); NVIDIA's recipes keep MTP depths in bf16 under MXFP8 too.
    """
    return "mxfp8" if module == "linear_out" and precision == "nvfp4" else "bf16"
