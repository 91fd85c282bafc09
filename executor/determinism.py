"""Runs that repeat themselves bit by bit, at the price of the fastest attention kernel."""

import os

import torch


def make_deterministic() -> None:
    """Let torch refuse kernels whose sums depend on timing, and choose others where it has them.

    To be called before the first use of the GPU. Our own kernels add each number once, in one order. Attention goes to
    torch's flash kernel, because cuDNN's backward is not among the deterministic ones.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is loaded
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory is for finding reads of what was never written; it costs a pass over every buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
