"""Which back ends compute a plan's experts and attention fastest here: measured before training, remembered on disk.

Candidates are compared under load (:mod:`moeplan.executor.candidate_timing`). A choice is kept by device, versions and
shape, so the next run of a shape starts at once.

Shapes: E experts of this rank, R rows, H input width, F output width.
"""

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from moeplan.errors import InvalidInputError
from moeplan.executor import attention_tuning
from moeplan.executor.attention_tuning import attention_key, attention_shape, measure_attention
from moeplan.executor.candidate_timing import compare
from moeplan.executor.mesh import Mesh
from moeplan.files import write_text_atomically
from moeplan.kernels import flash_attention, grouped_gemm, grouped_gemm_quack, grouped_weight_grad
from moeplan.kernels.back_end_choice import Shape, choices, choose
from moeplan.kernels.grouped_weight_grad import TRITON, add_parts_, triton_takes
from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.optional_package import with_compiler
from moeplan.kernels.weight_grad_pairs import Operands
from moeplan.plan import Plan
from moeplan.vocabulary import ExpertMatrix

FOLDER_VARIABLE = "MOEPLAN_CACHE"
LARGE_EXPERT_ROWS = 256  # below it one launch an expert costs more than its products: never a candidate
# Of the GPU, an expert's product: less leaves the host, which launches all else too and waits for offsets in each
# layer, no time to stay ahead. By expert, h200-deepseek (64 experts, 40 and 80 us each) had steps of 1134 to 1253 ms.
LEAST_PRODUCT_S = 200e-6
_BACK_ENDS: Mapping[str, Collection[str]] = {
    grouped_gemm.OPERATION: grouped_gemm.PRODUCTS,
    grouped_gemm.INPUT_GRAD: grouped_gemm.PRODUCTS,
    grouped_weight_grad.OPERATION: grouped_weight_grad.BACKENDS,
    flash_attention.OPERATION: attention_tuning.BACK_ENDS,
}
_Times = dict[str, dict[str, float]]  # seconds by operation and back end
_Comparison = tuple[Shape, str, Callable[[], _Times]]  # of weights or heads, its key, and how it is measured


def cache_path() -> Path:
    """Where choices are kept: ``$MOEPLAN_CACHE``, or ``moeplan`` in the user's cache folder."""
    own, shared = os.environ.get(FOLDER_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "moeplan"
    return folder / "kernels.json"


def expert_shapes(plan: Plan, mesh: Mesh) -> list[Shape]:
    """Shapes [E, H, F] of the expert weights of a rank."""
    moe, model = plan.model.moe, plan.model
    if moe is None:
        return []
    num_local, width = moe.num_experts // mesh.ep.size, moe.expert_ffn_size // mesh.etp.size
    rows = model.expert_hidden_size
    return [(num_local, rows, width * (2 if model.is_gated else 1)), (num_local, width, rows)]


def tune(
    plan: Plan,
    mesh: Mesh,
    device: torch.device,
    *,
    deterministic: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, str]:
    """Choose back ends for the plan's attention and bf16 experts, from the cache or by measuring; nothing on a CPU.

    Nor in a ``deterministic`` run: what is fastest may differ between two of them, and with it their rounding. Needs
    the memory of one layer's experts, so it belongs before the model is built. Ranks choose for themselves. ``report``
    is told before anything is measured, which takes up to half a minute a shape. Returns all choices by operation.
    """
    if deterministic or device.type != "cuda":
        return {}
    path = cache_path()
    known = _read(path)
    for shape, key, measure in _comparisons(plan, mesh, device):
        if key not in known:
            report(f"timing kernels for {key} (kept in {path})")
            known[key] = measure()
            _keep(path, known)
        for operation, times_s in known[key].items():
            if operation == grouped_weight_grad.OPERATION and plan.grad_dtype != "fp32":
                continue  # timed as additions to fp32
            barred = _barred(plan, times_s, shape)
            runs = [name for name, time_s in times_s.items() if math.isfinite(time_s)]
            allowed = [name for name in runs if name in _BACK_ENDS.get(operation, ()) and name not in barred]
            if allowed:  # another version may have left other names
                choose(operation, shape, min(allowed, key=lambda name: times_s[name]))
    torch.cuda.empty_cache()
    return choices()


def _keep(path: Path, known: Mapping[str, _Times]) -> None:
    """Remember comparisons in which every candidate ran: what failed once, for want of memory say, is tried again."""
    whole = {key: by_operation for key, by_operation in known.items() if _is_whole(by_operation)}
    with suppress(InvalidInputError):  # a folder that cannot be written costs the next run half a minute
        write_text_atomically(path, json.dumps(whole, indent=2, sort_keys=True) + "\n")


def _is_whole(by_operation: _Times) -> bool:
    return all(math.isfinite(time_s) for times_s in by_operation.values() for time_s in times_s.values())


def _comparisons(plan: Plan, mesh: Mesh, device: torch.device) -> Iterator[_Comparison]:
    where = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    heads = attention_shape(plan, mesh)
    if what := attention_key(plan, heads):
        yield heads, f"{where}, {what}", lambda: {flash_attention.OPERATION: measure_attention(plan, heads, device)}
    moe = plan.model.moe
    if plan.precision != "bf16" or moe is None:
        return
    num_rows = plan.tokens_per_rank * moe.top_k * mesh.etp.size  # on average, whatever ep is
    for shape, matrix in zip(expert_shapes(plan, mesh), get_args(ExpertMatrix), strict=True):
        is_paired = matrix in plan.paired_wgrad
        key = f"{where}, {_experts_key(shape, num_rows, is_paired=is_paired)}"
        yield shape, key, partial(_measure, shape, num_rows, device, is_paired=is_paired)


def _barred(plan: Plan, times_s: Mapping[str, float], shape: Shape) -> set[str]:
    """Back ends that a plan cannot take, however fast."""
    barred: set[str] = set()
    # "by_expert" asks the device where experts begin: a graph cannot, and overlapped work would wait with it.
    if plan.cuda_graph or plan.ep_overlap or is_launch_bound(times_s, shape[0]):
        barred.add("by_expert")
    if plan.cuda_graph:  # nobody has captured these here yet
        barred |= {flash_attention.NAME, *grouped_gemm_quack.TILES}
    if plan.folding.ep > 1 or plan.dynamic_cp:  # it keeps a launch plan for each number of rows, and drops none
        barred |= set(grouped_gemm_quack.TILES)
    return barred


def is_launch_bound(times_s: Mapping[str, float], num_products: int) -> bool:
    """Whether one launch for each of so many products leaves the host too little time, given seconds of all."""
    return times_s.get("by_expert", 0.0) < LEAST_PRODUCT_S * num_products


def product_candidates(x_RH: Tensor, weight_EHF: Tensor) -> list[str]:
    """Back ends that may be fastest for these operands, on average as many rows for each expert."""
    names = ["torch"]
    if len(x_RH) >= LARGE_EXPERT_ROWS * len(weight_EHF):
        names.append("by_expert")
    if grouped_gemm_quack.takes(x_RH, weight_EHF):
        names += grouped_gemm_quack.TILES
    return names


def drawn_offsets(E: int, num_rows: int, device: torch.device) -> Tensor:
    """Where the rows of each expert end, each drawn with equal odds.

    As many for each would fill whole tiles, which no router's do: 128 experts of 1024 rows took 1.90 ms forward,
    drawn rows 2.06 (results/2026-11-30-h200-one-run.md).
    """
    generator = torch.Generator().manual_seed(0)
    num_rows_E = torch.multinomial(torch.ones(E), num_rows, replacement=True, generator=generator).bincount(minlength=E)
    return num_rows_E.cumsum(0).to(torch.int32).to(device)


def _read(path: Path) -> dict[str, _Times]:
    """What is remembered: seconds by back end, operation and key. A file that cannot be read is made anew."""
    try:
        known: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _experts_key(shape: Shape, num_rows: int, *, is_paired: bool) -> str:
    quack = grouped_gemm_quack.installed_version()
    with_quack = f"quack {with_compiler(quack)}, " if quack else ""
    what = f"{'x'.join(map(str, shape))}, {num_rows} rows, bf16 into fp32{' of two micro-batches' if is_paired else ''}"
    return f"{with_quack}{what}, each product in rounds under load"


def _measure(shape: Shape, num_rows: int, device: torch.device, *, is_paired: bool) -> _Times:
    """Seconds of each candidate: a forward product, an input's gradient, additions of one or two weight gradients."""
    E, H, F = shape
    offsets_E = drawn_offsets(E, num_rows, device)
    x_RH = torch.randn((num_rows, H), device=device).bfloat16()
    grad_RF = torch.randn((num_rows, F), device=device).bfloat16()
    weight_EHF = torch.randn(shape, device=device).bfloat16()
    main = MainGrad(torch.zeros(shape, device=device), is_clear=False)
    names = product_candidates(x_RH, weight_EHF)
    by_name = {name: grouped_gemm.PRODUCTS[name] for name in names}
    forward = {name: partial(run, x_RH, weight_EHF, offsets_E) for name, run in by_name.items()}
    input_grad = {name: partial(run, grad_RF, weight_EHF.transpose(1, 2), offsets_E) for name, run in by_name.items()}
    if triton_takes(main.total, x_RH):
        names += TRITON
    parts = [Operands(x_RH, grad_RF, offsets_E)]
    if is_paired:  # in memory of their own: the same again would come from L2
        parts.append(Operands(x_RH.clone(), grad_RF.clone(), offsets_E))
    additions = {name: partial(add_parts_, main, parts, backend=name) for name in names}
    return {
        grouped_gemm.OPERATION: compare(forward),
        grouped_gemm.INPUT_GRAD: compare(input_grad),
        grouped_weight_grad.OPERATION: compare(additions),
    }
