"""Grouped GEMMs and their weight gradients by quack's kernels for Hopper (package quack-kernels, the extra ``hopper``).

Their products run in warpgroups that take turns at the tensor cores or share a tile, fed by bulk copies that a cluster
of two shares, so an output leaves while the next tile multiplies; weight gradients are added to fp32 by bulk
reductions. One H200 at its power limit, ms, 128 experts of 1024 rows, 768 x 2048: forward 0.72 (grouped_mm 0.82), input
gradient 0.69 (0.75), weight gradient 0.81 (``triton`` 1.07 alone, 0.85 in pairs). Compiled when first used, 1 s a tile.

Shapes: T rows sorted by expert, H input width, F output width, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeplan.kernels.main_grad import MainGrad
from moeplan.kernels.optional_package import version_in_series
from moeplan.kernels.weight_grad_pairs import Operands

PACKAGE = "quack-kernels"
_SERIES = "0.6."  # its low-level call has no promise of stability
_OFFSETS_ATTRIBUTE = "offsets_from_zero"


@dataclass(frozen=True, slots=True)
class Tile:
    """Output tile of a program, and how many programs share operands along the rows or the columns of the output.

    ``pingpong``: two warpgroups with a tile each take turns; else they share one.
    """

    rows: int
    columns: int
    cluster_rows: int = 2
    cluster_columns: int = 1
    pingpong: bool = True


# By name of the back end: those of 13 tried that were the fastest of a pass and shape, or within 1 % of it.
TILES = {
    "quack_128x128": Tile(128, 128),
    "quack_128x192": Tile(128, 192),
    "quack_128x192_columns": Tile(128, 192, 1, 2),
    "quack_192x128": Tile(192, 128),
    "quack_128x256": Tile(128, 256, pingpong=False),
    "quack_256x128": Tile(256, 128, 1, 2, pingpong=False),
}


def installed_version() -> str | None:
    """Of the package, where these calls fit it."""
    return version_in_series(PACKAGE, _SERIES)


def takes(x_TH: Tensor, weight_EHF: Tensor) -> bool:
    """Whether the package is here, and operands are what its tiles were tested on: bf16 on Hopper, whole 16 bytes."""
    return (
        installed_version() is not None
        and x_TH.is_cuda
        and x_TH.dtype == torch.bfloat16
        and all(width % 8 == 0 for width in weight_EHF.shape[1:])
        and torch.cuda.get_device_capability(x_TH.device)[0] == 9
    )


def product(name: str, x_TH: Tensor, weight_EHF: Tensor, offsets_E: Tensor) -> Tensor:
    """See :class:`moeplan.kernels.grouped_gemm.GroupedProduct`; ``weight_EHF`` may be a transposed view."""
    y_TF = x_TH.new_empty((len(x_TH), weight_EHF.shape[2]))
    if len(x_TH):
        _run(name, x_TH.contiguous(), weight_EHF.transpose(1, 2), y_TF, cu_seqlens_m=_from_zero(offsets_E))
    return y_TF


def add_(name: str, main: MainGrad, parts: Sequence[Operands]) -> None:
    """See :class:`moeplan.kernels.grouped_weight_grad.GroupedWeightGrad`; of a pair each is added by itself."""
    for part in parts:
        if not len(part.x_TH):
            main.add_zeros_()
            continue
        x_HT, grad_FT = part.x_TH.contiguous().t(), part.grad_TF.contiguous().t()
        _run(
            name, x_HT, grad_FT, main.total,
            cu_seqlens_k=_from_zero(part.offsets_E), add_to_output=not main.is_clear,
        )  # fmt: skip
        main.is_clear = False


def _run(name: str, a: Tensor, b: Tensor, out: Tensor, **kwargs: Any) -> None:
    tile = TILES[name]
    _gemm()(
        a, b, out, None, None, tile.rows, tile.columns, tile.cluster_rows, tile.cluster_columns,
        pingpong=tile.pingpong, **kwargs,
    )  # fmt: skip


@cache
def _gemm() -> Any:
    from quack.gemm import gemm  # noqa: PLC0415 - an optional package, and a compiler no CPU process needs

    return gemm


def _from_zero(offsets_E: Tensor) -> Tensor:
    """Offsets with the start of the first expert before them, made once for each tensor of them."""
    known: Tensor | None = getattr(offsets_E, _OFFSETS_ATTRIBUTE, None)
    if known is None:
        known = functional.pad(offsets_E, (1, 0))
        setattr(offsets_E, _OFFSETS_ATTRIBUTE, known)
    return known
