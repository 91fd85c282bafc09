"""What cross entropy needs to know of the logits of a token."""
# ruff: noqa: N815 - shape suffixes

from typing import NamedTuple

from torch import Tensor


class LogitStats(NamedTuple):
    """By token, in fp32 at least: the largest logit, the sum of exp(logit - largest), the target's logit or 0."""

    highest_T: Tensor
    sum_T: Tensor
    target_T: Tensor
