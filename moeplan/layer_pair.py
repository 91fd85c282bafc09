"""How one layer's forward runs beside another micro-batch's backward under expert-parallel overlap.

The five steps of report section 2.5, which simulator and executor both follow. A layer has four segments, in order:
``before`` (what is left of the layer before it: weighing and adding up what came back; then attention, norms, router,
shared expert), ``dispatch``, ``expert`` and ``combine``.
"""

from typing import Literal, NamedTuple

Segment = Literal["before", "dispatch", "expert", "combine"]


class Work(NamedTuple):
    """One segment of a layer of the newer micro-batch, ``f`` (fwd), or of the older, ``b``.

    dgrad holds the weight gradients as well where they are not delayed; wgrad is nothing then.
    """

    layer: Literal["f", "b"]
    segment: Segment
    phase: Literal["fwd", "dgrad", "wgrad"]


class PairStep(NamedTuple):
    """An exchange, and the compute that runs beside it in this order. What the exchange brings, the next steps use."""

    exchange: Work | None
    compute: tuple[Work, ...]


LAYER_PAIR: tuple[PairStep, ...] = (
    PairStep(Work("b", "combine", "dgrad"), (Work("f", "before", "fwd"),)),
    PairStep(Work("f", "dispatch", "fwd"), (Work("b", "expert", "dgrad"),)),
    PairStep(Work("b", "dispatch", "dgrad"), (Work("b", "expert", "wgrad"), Work("f", "expert", "fwd"))),
    PairStep(Work("f", "combine", "fwd"), (Work("b", "before", "dgrad"),)),
    PairStep(None, (Work("b", "before", "wgrad"),)),
)
