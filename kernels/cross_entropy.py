"""The two passes over logits that cross entropy needs, for vocabularies that may be split over ranks.

Logits stay in the dtype of their GEMM and become their own gradient, so that one copy of them is all there is.

Shapes: T tokens, V vocabulary entries of this rank.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from moeplan.kernels import cross_entropy_torch
from moeplan.kernels.logit_stats import LogitStats
from moeplan.kernels.triton_choice import default_backend


class CrossEntropy(Protocol):
    """A back end: the two functions below."""

    def logit_stats(self, logits_TV: Tensor, target_T: Tensor) -> LogitStats: ...

    def logit_gradient_(self, logits_TV: Tensor, log_sum_T: Tensor, grad_T: Tensor, target_T: Tensor) -> Tensor: ...


def _triton() -> CrossEntropy:
    from moeplan.kernels import cross_entropy_triton  # noqa: PLC0415 - loads a compiler no CPU process needs

    return cross_entropy_triton


BACKENDS: dict[str, Callable[[], CrossEntropy]] = {"torch": lambda: cross_entropy_torch, "triton": _triton}


def logit_stats(logits_TV: Tensor, target_T: Tensor, *, backend: str | None = None) -> LogitStats:
    """One pass over the logits. ``target_T`` (int64) is the entry of each token's target here, -1 where elsewhere."""
    return BACKENDS[backend or default_backend(logits_TV)]().logit_stats(logits_TV, target_T)


def logit_gradient_(
    logits_TV: Tensor, log_sum_T: Tensor, grad_T: Tensor, target_T: Tensor, *, backend: str | None = None
) -> Tensor:
    """The logits overwritten by their gradient: (exp(logit - log_sum) - [is target]) * grad.

    ``log_sum_T`` is the logarithm of the sum of exp(logit) over the whole vocabulary.
    """
    run = BACKENDS[backend or default_backend(logits_TV)]()
    return run.logit_gradient_(logits_TV, log_sum_T, grad_T, target_T)
