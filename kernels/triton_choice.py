"""Which back end runs where none is named. Imports no Triton: a CPU process would load a compiler for nothing."""

from torch import Tensor


def default_backend(x: Tensor) -> str:
    """``triton`` on CUDA, ``torch`` elsewhere."""
    return "triton" if x.is_cuda else "torch"
