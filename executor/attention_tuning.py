"""Which back end computes a plan's attention fastest: what is compared, and how.

Shapes: B sequences of S tokens, N query heads over M key-value heads of this rank, D width of a head.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moeplan.executor.attention import SDPA, causal_attention
from moeplan.executor.candidate_timing import compare
from moeplan.executor.dtypes import plan_dtypes
from moeplan.executor.mesh import Mesh
from moeplan.kernels import flash_attention
from moeplan.kernels.optional_package import with_compiler
from moeplan.mixers import GqaAttention
from moeplan.plan import Plan

BACK_ENDS = (SDPA, flash_attention.NAME)


def attention_shape(plan: Plan, mesh: Mesh) -> tuple[int, ...]:
    """Of a rank's attention, as :func:`moeplan.kernels.flash_attention.shape_of` has it."""
    attention = plan.model.attention
    heads = attention.num_heads // mesh.tp.size
    kv_heads = attention.num_kv_heads // mesh.tp.size if isinstance(attention, GqaAttention) else heads
    return heads, kv_heads, attention.qk_head_dim, attention.v_head_dim


def attention_key(plan: Plan, shape: tuple[int, ...]) -> str | None:
    """What names a comparison; None where there is nothing to compare.

    Sequences are whole and one document each, as they are timed, and some layer sees all of its past without sinks.
    FlashAttention takes 16-bit heads of one width, and nobody has captured it in a graph here yet.
    """
    model, version = plan.model, flash_attention.installed_version()
    is_whole = plan.folding.cp == 1 and not plan.dynamic_cp and len(plan.documents) == 1
    is_plain = True
    if isinstance(attention := model.attention, GqaAttention):
        is_short = attention.sliding_window is not None and attention.sliding_window < plan.seq_len
        is_masked = is_short and all(model.is_windowed(layer) for layer in range(model.num_layers))
        is_plain = not (is_masked or attention.sinks)
    is_taken = plan_dtypes(plan).param == torch.bfloat16 and shape[2] == shape[3]
    if version is None or plan.cuda_graph or not (is_whole and is_plain and is_taken):
        return None
    heads = "x".join(map(str, shape))
    return f"flash_attn {with_compiler(version)}, attention {heads}, {plan.mbs} x {plan.seq_len}, bf16, under load"


def attention_candidates(q_BSND: Tensor, v_BSMD: Tensor) -> list[str]:
    """Back ends that may be fastest for these heads."""
    return [SDPA] + [flash_attention.NAME] * flash_attention.takes(q_BSND, v_BSMD)


def measure_attention(plan: Plan, shape: tuple[int, ...], device: torch.device) -> dict[str, float]:
    """Seconds of each candidate, forward and backward."""
    N, M, D, _ = shape
    sizes = ((N, D), (M, D), (M, D))
    q_BSND, k_BSMD, v_BSMD = (
        torch.randn((plan.mbs, plan.seq_len, heads, width), device=device).bfloat16().requires_grad_()
        for heads, width in sizes
    )
    grad_BSND = torch.randn_like(q_BSND)
    names = attention_candidates(q_BSND, v_BSMD)
    return compare({name: _both_ways(name, (q_BSND, k_BSMD, v_BSMD), grad_BSND) for name in names})


def _both_ways(name: str, heads: tuple[Tensor, Tensor, Tensor], grad_BSND: Tensor) -> Callable[[], object]:
    attend = partial(causal_attention, *heads, backend=name)

    def run() -> object:
        return torch.autograd.grad(attend(), heads, grad_BSND)

    return run
