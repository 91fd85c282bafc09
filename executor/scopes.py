"""Names in the profiler's trace that say which op family the work inside belongs to."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.profiler import record_function

from moeplan.vocabulary import OP_FAMILIES, OpFamily

PREFIX = "moeplan/"
TASK_LABEL, STOP_LABEL = "moeplan_task", "moeplan_stop"  # what a fiber runs, and where it lets others run
_LABELS: dict[OpFamily, str] = {family: f"{PREFIX}{family}" for family in OP_FAMILIES}
_NOTHING: AbstractContextManager[None] = nullcontext()


class _Tracing:
    """Of the whole process: threads of fibers and of autograd have scopes as well."""

    is_on = False


_tracing = _Tracing()


@contextmanager
def tracing() -> Iterator[None]:
    """Around what a profiler records: scopes inside have names, and steps run without CUDA graphs.

    Whoever starts a profiler says so here, because torch has no public question for it, and what it answers differs by
    profiler: of one that records all threads, ``torch._C._autograd._profiler_enabled`` knows nothing.
    """
    _tracing.is_on = True
    try:
        yield
    finally:
        _tracing.is_on = False


def is_traced() -> bool:
    """Whether :func:`tracing` is under way, in any thread."""
    return _tracing.is_on


def labelled(label: str) -> AbstractContextManager[object]:
    """An event of that name in a trace."""
    if not _tracing.is_on:
        return _NOTHING
    return record_function(label)


def scope(family: OpFamily) -> AbstractContextManager[object]:
    """Work inside belongs to ``family``, and so does its backward, unless a nearer scope says otherwise.

    Waiting for a collective counts where ``wait`` is called, so that call belongs inside a scope as well. Free (0.1 us)
    while nothing is traced.
    """
    # record_function costs 4 us even when no profiler runs: as much as launching a kernel.
    if not _tracing.is_on:
        return _NOTHING
    return record_function(_LABELS[family])
