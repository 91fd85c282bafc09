"""Names in the profiler's trace that say which op family the work inside belongs to."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

from moeplan.vocabulary import OP_FAMILIES, OpFamily

PREFIX = "moeplan/"
TASK_LABEL, STOP_LABEL = "moeplan_task", "moeplan_stop"  # what a fiber runs, and where it lets others run
_LABELS: dict[OpFamily, str] = {family: f"{PREFIX}{family}" for family in OP_FAMILIES}
_NOTHING: AbstractContextManager[None] = nullcontext()


def labelled(label: str) -> AbstractContextManager[object]:
    """An event of that name in a trace."""
    if not torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001 - as below
        return _NOTHING
    return record_function(label)


def scope(family: OpFamily) -> AbstractContextManager[object]:
    """Work inside belongs to ``family``, and so does its backward, unless a nearer scope says otherwise.

    Waiting for a collective counts where ``wait`` is called, so that call belongs inside a scope as well. Free (0.1 us)
    while nothing is traced.
    """
    # record_function costs 4 us even when no profiler runs: as much as launching a kernel.
    if not torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001 - torch has no public question for it
        return _NOTHING
    return record_function(_LABELS[family])
