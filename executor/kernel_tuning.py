"""Which back end multiplies a plan's experts fastest on this GPU: measured before training, remembered on disk.

Candidates are compared under load (:mod:`moeplan.executor.candidate_timing`). A choice is kept by device, versions and
shape, so the next run of a shape starts at once.

Shapes: E experts of this rank, R rows, H input width, F output width.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from moeplan.errors import InvalidInputError
from moeplan.executor.candidate_timing import under_load
from moeplan.executor.mesh import Mesh
from moeplan.files import write_text_atomically
from moeplan.kernels import grouped_gemm, grouped_weight_grad
from moeplan.kernels.back_end_choice import Shape, choices, choose
from moeplan.kernels.grouped_weight_grad import TRITON, add_parts_, triton_takes
from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.weight_grad_pairs import Operands
from moeplan.plan import Plan
from moeplan.vocabulary import ExpertMatrix

FOLDER_VARIABLE = "MOEPLAN_CACHE"
LARGE_EXPERT_ROWS = 256  # below it one launch an expert costs more than its products: never a candidate
# Of the GPU, an expert's product: less leaves the host, which launches all else too and waits for offsets in each
# layer, no time to stay ahead. By expert, h200-deepseek (64 experts, 40 and 80 us each) had steps of 1134 to 1253 ms.
LEAST_PRODUCT_S = 200e-6
_BACK_ENDS: Mapping[str, Collection[str]] = {
    grouped_gemm.OPERATION: grouped_gemm.BACKENDS,
    grouped_weight_grad.OPERATION: grouped_weight_grad.BACKENDS,
}


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


def tune(plan: Plan, mesh: Mesh, device: torch.device, *, deterministic: bool = False) -> dict[str, str]:
    """Choose back ends for the plan's bf16 experts, from the cache or by measuring; nothing on a CPU.

    Nor in a ``deterministic`` run: what is fastest may differ between two of them, and with it their rounding. Needs
    the memory of one layer's experts, so it belongs before the model is built. Ranks choose for themselves. Returns all
    choices by operation.
    """
    moe = plan.model.moe
    if deterministic or device.type != "cuda" or plan.precision != "bf16" or moe is None:
        return {}
    num_rows = plan.tokens_per_rank * moe.top_k * mesh.etp.size  # on average, whatever ep is
    path = cache_path()
    known = _read(path)
    for shape, matrix in zip(expert_shapes(plan, mesh), get_args(ExpertMatrix), strict=True):
        is_paired = matrix in plan.paired_wgrad
        key = _key(shape, num_rows, device, is_paired=is_paired)
        if key not in known:
            known[key] = _measure(shape, num_rows, device, is_paired=is_paired)
            with suppress(InvalidInputError):  # a folder that cannot be written costs the next run a second
                write_text_atomically(path, json.dumps(known, indent=2, sort_keys=True) + "\n")
        for operation, times_s in known[key].items():
            # "by_expert" asks the device where experts begin: a graph cannot, and overlapped work would wait with it.
            is_barred = plan.cuda_graph or plan.ep_overlap or _is_launch_bound(times_s, operation, shape)
            barred = {"by_expert"} if is_barred else set()
            allowed = [name for name in times_s if name in _BACK_ENDS.get(operation, ()) and name not in barred]
            if allowed:  # another version may have left other names
                choose(operation, shape, min(allowed, key=lambda name: times_s[name]))
    torch.cuda.empty_cache()
    return choices()


def _is_launch_bound(times_s: Mapping[str, float], operation: str, shape: Shape) -> bool:
    """Whether one launch an expert leaves the host too little time; both products that autograd takes are timed."""
    num_products = shape[0] * (2 if operation == grouped_gemm.OPERATION else 1)
    return times_s.get("by_expert", 0.0) < LEAST_PRODUCT_S * num_products


def _read(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """What is remembered: seconds by back end, operation and key. A file that cannot be read is made anew."""
    try:
        known: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _key(shape: Shape, num_rows: int, device: torch.device, *, is_paired: bool) -> str:
    where = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    what = f"{'x'.join(map(str, shape))}, {num_rows} rows, bf16 into fp32{' of two micro-batches' if is_paired else ''}"
    return f"{where}, {what}, in rounds under load"


def _measure(shape: Shape, num_rows: int, device: torch.device, *, is_paired: bool) -> dict[str, dict[str, float]]:
    """Seconds of each candidate: both products that autograd takes, and the addition of one or two weight gradients."""
    E, H, F = shape
    generator = torch.Generator().manual_seed(0)
    num_rows_E = torch.multinomial(torch.ones(E), num_rows, replacement=True, generator=generator).bincount(minlength=E)
    offsets_E = num_rows_E.cumsum(0).to(torch.int32).to(device)
    x_RH = torch.randn((num_rows, H), device=device).bfloat16().requires_grad_()
    grad_RF = torch.randn((num_rows, F), device=device).bfloat16()
    weight_EHF = torch.randn(shape, device=device).bfloat16()
    main = MainGrad(torch.zeros(shape, device=device), is_clear=False)
    names = ["torch", "by_expert"] if num_rows >= LARGE_EXPERT_ROWS * E else ["torch"]
    products = {name: _product(name, x_RH, weight_EHF, offsets_E, grad_RF) for name in names}
    if triton_takes(main.total, x_RH):
        names += TRITON
    parts = [Operands(x_RH.detach(), grad_RF, offsets_E)]
    if is_paired:  # in memory of their own: the same again would come from L2
        parts.append(Operands(x_RH.detach().clone(), grad_RF.clone(), offsets_E))
    additions = {name: partial(add_parts_, main, parts, backend=name) for name in names}
    return {grouped_gemm.OPERATION: under_load(products), grouped_weight_grad.OPERATION: under_load(additions)}


def _product(name: str, x_RH: Tensor, weight_EHF: Tensor, offsets_E: Tensor, grad_RF: Tensor) -> Callable[[], object]:
    def run() -> Any:
        y_RF = grouped_gemm.grouped_gemm(x_RH, weight_EHF, offsets_E, backend=name)
        return torch.autograd.grad(y_RF, x_RH, grad_RF)

    return run
