"""Which back ends compute a plan's experts and attention fastest here: measured before training, remembered on disk.

Candidates are compared under load (:mod:`moeplan.executor.candidate_timing`). A choice is kept by device, versions and
shape, so the next run of a shape starts at once.
"""

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from moeplan.errors import InvalidInputError
from moeplan.executor import attention_tuning
from moeplan.executor.attention_tuning import attention_key, attention_shape, measure_attention
from moeplan.executor.expert_tuning import (
    expert_shapes,
    experts_key,
    is_launch_bound,
    may_take_quack,
    measure_experts,
)
from moeplan.executor.mesh import Mesh
from moeplan.files import write_text_atomically
from moeplan.kernels import flash_attention, grouped_gemm, grouped_weight_grad
from moeplan.kernels.back_end_choice import Shape, choices, choose
from moeplan.plan import Plan
from moeplan.vocabulary import ExpertMatrix

FOLDER_VARIABLE = "MOEPLAN_CACHE"
_BACK_ENDS: Mapping[str, Collection[str]] = {
    grouped_gemm.OPERATION: grouped_gemm.PRODUCTS,
    grouped_gemm.INPUT_GRAD: grouped_gemm.PRODUCTS,
    grouped_weight_grad.OPERATION: grouped_weight_grad.BACKENDS,
    flash_attention.OPERATION: attention_tuning.BACK_ENDS,
}
_Times = dict[str, dict[str, float]]  # seconds by operation and back end


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Of the heads or a weight of ``shape``: what it is remembered by, how it is measured.

    ``num_added``: micro-batches whose weight gradients one addition has.
    """

    shape: Shape
    key: str
    measure: Callable[[], _Times]
    num_added: int = 1


def cache_path() -> Path:
    """Where choices are kept: ``$MOEPLAN_CACHE``, or ``moeplan`` in the user's cache folder."""
    own, shared = os.environ.get(FOLDER_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "moeplan"
    return folder / "kernels.json"


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
    for one in _comparisons(plan, mesh, device):
        if one.key not in known:
            report(f"timing kernels for {one.key} (kept in {path})")
            known[one.key] = one.measure()
            _keep(path, known)
        for operation, times_s in known[one.key].items():
            is_addition = operation == grouped_weight_grad.OPERATION
            if is_addition and plan.grad_dtype != "fp32":
                continue  # timed as additions to fp32
            barred = _barred(plan, times_s, one.shape[0] * (one.num_added if is_addition else 1))
            runs = [name for name, time_s in times_s.items() if math.isfinite(time_s)]
            allowed = [name for name in runs if name in _BACK_ENDS.get(operation, ()) and name not in barred]
            if allowed:  # another version may have left other names
                choose(operation, one.shape, min(allowed, key=lambda name: times_s[name]))
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
        yield _Comparison(
            heads, f"{where}, {what}", lambda: {flash_attention.OPERATION: measure_attention(plan, heads, device)}
        )
    moe = plan.model.moe
    if plan.precision != "bf16" or moe is None:
        return
    num_rows = plan.tokens_per_rank * moe.top_k * mesh.etp.size  # on average, whatever ep is
    with_quack = may_take_quack(plan)
    for shape, matrix in zip(expert_shapes(plan, mesh), get_args(ExpertMatrix), strict=True):
        num_added = 2 if matrix in plan.paired_wgrad else 1
        key = experts_key(shape, num_rows, num_added, with_quack=with_quack)
        measure = partial(measure_experts, shape, num_rows, device, num_added, with_quack=with_quack)
        yield _Comparison(shape, f"{where}, {key}", measure, num_added)


def _barred(plan: Plan, times_s: Mapping[str, float], num_products: int) -> set[str]:
    """Back ends that a plan cannot take, however fast."""
    # "by_expert" asks the device where experts begin: a graph cannot, and overlapped work would wait with it.
    waits = plan.cuda_graph or plan.ep_overlap or is_launch_bound(times_s.get("by_expert", 0.0), num_products)
    return {"by_expert"} if waits else set()


def _read(path: Path) -> dict[str, _Times]:
    """What is remembered: seconds by back end, operation and key. A file that cannot be read is made anew."""
    try:
        known: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
