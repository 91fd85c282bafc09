"""How one layer's forward runs beside another micro-batch's backward under expert-parallel overlap.

The five steps of report section 2.5, which simulator and executor both follow. A layer has five segments, in order:
``before`` (attention, norms, router, shared expert), ``dispatch``, ``expert``, ``combine`` and ``after`` (weighing
and adding up what came back). ``f`` is a layer of the newer micro-batch, ``b`` one of the older.
"""

from typing import Literal, NamedTuple

Segment = Literal["before", "dispatch", "expert", "combine", "after"]


class Work(NamedTuple):
    """One segment of ``f`` (fwd) or ``b`` (dgrad; wgrad apart from it only where weight gradients are delayed)."""

    layer: Literal["f", "b"]
    segment: Segment
    phase: Literal["fwd", "dgrad", "wgrad"]


class PairStep(NamedTuple):
    """An exchange, and the compute that runs beside it in this order. What the exchange brings, the next steps use."""

    exchange: Work | None
    compute: tuple[Work, ...]


# The gradient of ``after`` is all that must come before the report's five steps.
LAYER_PAIR: tuple[PairStep, ...] = (
    PairStep(None, (Work("b", "after", "dgrad"),)),
    PairStep(Work("b", "combine", "dgrad"), (Work("f", "before", "fwd"),)),
    PairStep(Work("f", "dispatch", "fwd"), (Work("b", "expert", "dgrad"),)),
    PairStep(Work("b", "dispatch", "dgrad"), (Work("b", "expert", "wgrad"), Work("f", "expert", "fwd"))),
    PairStep(Work("f", "combine", "fwd"), (Work("b", "before", "dgrad"),)),
    PairStep(None, (Work("b", "before", "wgrad"), Work("f", "after", "fwd"))),
)
